def get_spmd_backend():
    return "spmd_types"
