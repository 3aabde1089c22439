def replace_prefix_for_sharding(sharded_state_dict, old_prefix, new_prefix):
    for each in sharded_state_dict.values():
        each.key = new_prefix + each.key.removeprefix(old_prefix)
