"""Files stay small: split by idea before a source file passes 500 lines, and nothing large is committed."""

import subprocess
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AIM_LINES = 400
MAX_LINES = 500
MAX_BYTES = 500_000


def committed() -> list[Path]:
    """Files that git tracks, or would track: generated and ignored ones do not count."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def too_long(paths: list[Path], limit: int) -> dict[str, int]:
    lines = {str(path): len(path.read_text().splitlines()) for path in paths if path.suffix == ".py"}
    return {name: count for name, count in lines.items() if count > limit}


def too_large(paths: list[Path]) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in paths if path.stat().st_size > MAX_BYTES}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git which files belong to the repository")
def test_files_of_the_repository():
    paths = committed()
    assert ROOT / "pyproject.toml" in paths
    assert too_large(paths) == {}
    assert too_long(paths, MAX_LINES) == {}
    for name, count in too_long(paths, AIM_LINES).items():
        warnings.warn(f"{name} has {count} lines; the aim is {AIM_LINES}", stacklevel=1)


def test_the_check_itself(tmp_path):
    short, long, large = tmp_path / "short.py", tmp_path / "long.py", tmp_path / "large.bin"
    short.write_text("x = 1\n" * MAX_LINES)
    long.write_text("x = 1\n" * (MAX_LINES + 1))
    large.write_bytes(b"0" * (MAX_BYTES + 1))
    assert too_long([short, long, large], MAX_LINES) == {str(long): MAX_LINES + 1}
    assert too_large([short, long, large]) == {str(large): MAX_BYTES + 1}
