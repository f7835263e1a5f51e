"""Print the lock file of the environment this runs in; `make lock` runs it where only this project's requirements are installed.

Left out: pip and this project; builds of one machine (``torch==2.13.0+cpu`` is locked as ``torch==2.13.0``); and torch's own
accelerator libraries, which its wheels for each platform name exactly themselves.
"""

from importlib import metadata

HEAD = """\
# What `make setup` installs, exact. Made on Python 3.11 by `make lock`; do not edit by hand.
# torch brings the accelerator libraries of its platform by itself, pinned by its own wheel.
"""
LEFT_OUT = ("pip", "elsi-lib")
OF_TORCH = ("nvidia-", "cuda-", "triton")


def lock() -> str:
    lines = set()
    for package in metadata.distributions():
        name = package.metadata["Name"]
        if name.lower() not in LEFT_OUT and not name.lower().startswith(OF_TORCH):
            lines.add(f"{name}=={package.version.partition('+')[0]}\n")
    return HEAD + "".join(sorted(lines, key=str.lower))


if __name__ == "__main__":
    print(lock(), end="")
