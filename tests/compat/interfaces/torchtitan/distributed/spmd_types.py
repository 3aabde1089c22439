def spmd_mesh_size(axis_name):
    return 1
