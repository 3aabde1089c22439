import torch
import torch.nn.functional as F


def squared_relu(x):
    return torch.pow(F.relu(x), 2)


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(x):
    return F.gelu(x, approximate="tanh")
