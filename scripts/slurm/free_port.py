"""Print the first port from FIRST on, and below 32768, at which this machine can listen now.

    python scripts/slurm/free_port.py 10005
"""

from __future__ import annotations

import socket
import sys

_END = 32768  # from here on the kernel assigns ports to connections, and might assign the port that was found before it is used


def is_free(port: int) -> bool:
    """Whether no process listens at `port`, on any address of this machine."""
    both = socket.has_dualstack_ipv6()
    try:
        socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    first = int(sys.argv[1])
    found = next(filter(is_free, range(first, _END)), None)
    if found is None:
        sys.exit(f"free_port.py: expected a free port from {first} to {_END - 1}, got none")
    print(found)
