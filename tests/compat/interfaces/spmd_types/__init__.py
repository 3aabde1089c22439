"""spmd_types, as far as experts of torchtitan call it: `checking` is switched by a test, `mutated` is what it reads."""

P, V = "P", "V"
checking = False
mutated = []


def is_type_checking():
    return checking


def mutate_type(tensor, axis, *, src, dst):
    mutated.append((tensor, axis, src, dst))
