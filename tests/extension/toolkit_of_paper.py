"""A CUDA toolkit whose nvcc only pretends, and steps that the tests of the extension share."""

from pathlib import Path

import torch

from gbmoe import extension

FAKE_NVCC = r"""#!/bin/sh
home=$(dirname "$(dirname "$0")")
case "$*" in
*--version*) printf 'nvcc: release 13.0, V13.0.88\n'; exit ;;
*--list-gpu-code*) echo 'sm_75 sm_80 sm_86 sm_90 sm_120'; exit ;;
*--dryrun*) printf '#$ TOP=%s\n' "$home" >&2; exit ;;
esac
echo "$*" >> "$home/commands"
while [ "$1" != -o ]; do shift; done
if [ -e "$home/fails" ]; then echo half > "$2"; echo 'no space' >&2; exit 1; fi
case "$*" in *-ltorch_cuda*) sleep 0.1; cp "$home/object" "$2" ;; *) : > "$2" ;; esac
"""


class Toolkit:
    """A CUDA toolkit whose nvcc writes down its commands, and links by copying the file `object`."""

    def __init__(self, home):
        self.home = home
        for name in ("bin/nvcc", "include/cublas_v2.h", "lib64/libcublas.so.13"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).touch()
        (home / "bin/nvcc").write_text(FAKE_NVCC)
        (home / "bin/nvcc").chmod(0o755)
        (home / "object").write_bytes(b"an object")
        self.loaded = []  # what the loader was given, in order

    def commands(self, with_word=""):
        log = self.home / "commands"
        return [line for line in log.read_text().splitlines() if with_word in line] if log.exists() else []

    def links(self):
        return len(self.commands("-ltorch_cuda"))

    def load(self, path):
        content = Path(path).read_bytes()
        self.loaded.append(content[:9])
        assert content.startswith((b"an object", b"foreign")), f"the loader was given {content!r}"
        if content.startswith(b"foreign"):
            raise OSError(f"Could not load this library: {path}") from OSError("version GLIBC_9.9 not found")


def devices(monkeypatch, *capabilities):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])


def again():
    """Forget what this process has loaded, as another process would start."""
    extension.load.cache_clear()
    return extension.load()


def why_not_loaded():
    status = again()
    assert not status.loaded and status.path is None
    return status.reason
