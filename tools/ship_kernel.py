"""Adds the compiled kernel to a pure wheel, so that its users need no compiler: ship_kernel.py WHEEL OUT.

Runs where that wheel is installed, with `wheel` and `auditwheel` beside it, on Linux x86-64 with a C++ compiler. The
new wheel's name says which glibc it needs: that of the system it is made on, or an older one.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipejax.kernels import cpu_kernel


def run(*arguments: str | Path) -> str:
    """Runs a Python module's command; returns what it prints."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], check=True, capture_output=True, text=True
    ).stdout


def pack(content: Path, platform: str, out: Path) -> Path:
    """Packs an unpacked wheel as one for that platform, whatever the Python."""
    (file,) = content.glob("*.dist-info/WHEEL")
    text = re.sub(r"^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", file.read_text(), flags=re.MULTILINE)
    file.write_text(re.sub(r"^Tag: .*$", f"Tag: py3-none-{platform}", text, flags=re.MULTILINE))
    run("wheel", "pack", "--dest-dir", out, content)
    (made,) = out.glob(f"*-{platform}.whl")
    return made


def main(argv: Sequence[str]) -> int:
    """Writes the wheel into the directory OUT and prints its path."""
    pure, out = map(Path, argv)
    with tempfile.TemporaryDirectory() as scratch:
        run("wheel", "unpack", "--dest", scratch, pure)
        (content,) = Path(scratch).iterdir()
        here = Path(cpu_kernel.__file__).parent
        target = content / "pipejax/kernels/cpu_kernel"
        for source in cpu_kernel.SOURCES:
            if (target / source.name).read_bytes() != source.read_bytes():
                sys.exit(f"{source}: differs from what {pure} has; expected that wheel to be installed")
        for level in cpu_kernel.LEVELS[:-1]:  # the last is for the machine that compiles
            library = target / cpu_kernel.shipped(level).relative_to(here)
            library.parent.mkdir(exist_ok=True)
            if failed := cpu_kernel.build(level, f"{os.environ.get('CXX', 'c++')} -s", library):
                sys.exit(f"{level.name}: {failed}")
            library.chmod(0o755)
        made = pack(content, "linux_x86_64", Path(scratch))
        # Each level is for processors that auditwheel would warn of; which one fits is found out where it is used.
        found = json.loads(run("auditwheel", "show", "--json", "--disable-isa-ext-check", made))
        print(pack(content, found["overall_tag"], out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
