"""Adds the compiled kernel to a pure wheel, so that users of the wheel need no compiler: ship_kernel.py WHEEL OUT.

The script needs Linux x86-64, a C++ compiler, and an environment with this wheel, `wheel` and `auditwheel` installed.
The name of the new wheel has the glibc that it requires: the version of this system or an older one.
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
    """Packs an unpacked wheel as a wheel for a platform and any Python; returns its path."""
    (file,) = content.glob("*.dist-info/WHEEL")
    text = re.sub(r"^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", file.read_text(), flags=re.MULTILINE)
    file.write_text(re.sub(r"^Tag: .*$", f"Tag: py3-none-{platform}", text, flags=re.MULTILINE))
    run("wheel", "pack", "--dest-dir", out, content)
    (made,) = out.glob(f"*-{platform}.whl")
    return made


def main(argv: Sequence[str]) -> int:
    """Writes the wheel to the directory OUT, and prints its path."""
    pure, out = map(Path, argv)
    with tempfile.TemporaryDirectory() as scratch:
        run("wheel", "unpack", "--dest", scratch, pure)
        (content,) = Path(scratch).iterdir()
        here = Path(cpu_kernel.__file__).parent
        target = content / "pipejax/kernels/cpu_kernel"
        for source in cpu_kernel.SOURCES:
            if (target / source.name).read_bytes() != source.read_bytes():
                sys.exit(f"{source}: differs from what {pure} has; expected that wheel to be installed")
        for level in cpu_kernel.LEVELS[:-1]:  # the last level is for the machine that compiles
            library = target / cpu_kernel.shipped(level).relative_to(here)
            library.parent.mkdir(exist_ok=True)
            if failed := cpu_kernel.build(level, f"{os.environ.get('CXX', 'c++')} -s", library):
                sys.exit(f"{level.name}: {failed}")
            library.chmod(0o755)
        made = pack(content, "linux_x86_64", Path(scratch))
        # auditwheel would warn about the processors of each level; the kernel chooses a level when it is loaded.
        found = json.loads(run("auditwheel", "show", "--json", "--disable-isa-ext-check", made))
        print(pack(content, found["overall_tag"], out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
