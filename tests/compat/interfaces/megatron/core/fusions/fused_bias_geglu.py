import torch


def quick_gelu(y):
    return y * torch.sigmoid(1.702 * y)
