"""Machine code of CUDA kernels on disk. Nothing here needs a GPU; three small kernels are compiled."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from narrows.compression.cuda import cubins
from narrows.compression.cuda.cubins import CubinStore
from narrows.compression.cuda.jit import KERNELS, Cubin

ARCH, NAMES = (9, 0), ["draw_words", "gather", "stretch_indices"]
OF_ONE = Cubin(b"code", "entry", 8, 0, 0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are compiled, with a compiler that takes no time."""
    names: list[str] = []

    def compile_at_once(self: CubinStore, missing: list[str], deadline: float, say: cubins.Say) -> None:
        names.extend(missing)
        for name in missing:
            self.known[name] = OF_ONE
            self._write(name, OF_ONE)

    monkeypatch.setattr(CubinStore, "_compile", compile_at_once)
    return names


def test_compiler_processes_make_what_the_disk_keeps(home: Path) -> None:
    said: list[str] = []
    first = CubinStore(ARCH, home)
    first.fill(NAMES, said.append)
    assert said[0] == "compiling kernels for sm_90: 0 of 3"
    for name in NAMES:
        cubin = first.get(name)
        assert cubin.code[:4] == b"\x7fELF" and name in cubin.entry and cubin.registers > 0 and cubin.local == 0
    second = CubinStore(ARCH, home)
    assert not second._missing(NAMES) and second.known == first.known


def test_two_processes_at_once_compile_each_kernel_once(home: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from narrows.compression.cuda.cubins import CubinStore\n"
        f"CubinStore({ARCH}, Path({str(home)!r})).fill({NAMES[:2]}, lambda text: print(text, flush=True))"
    )
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("compiling kernels for sm_90: 0 of 2" in text for text in said) == 1


@pytest.mark.parametrize("keep", [0, 10, 40, -1])
def test_a_torn_file_is_compiled_again(home: Path, compiled: list[str], keep: int) -> None:
    CubinStore(ARCH, home).fill(NAMES)
    (file,) = home.glob("cuda-90-*/gather.cubin")
    file.write_bytes(file.read_bytes()[:keep])
    store = CubinStore(ARCH, home)
    store.fill(NAMES)
    assert compiled == [*NAMES, "gather"] and store.get("gather") == OF_ONE
    assert CubinStore(ARCH, home)._missing(NAMES) == []


def test_a_folder_that_cannot_be_written_means_memory_only(home: Path, compiled: list[str]) -> None:
    (home / CubinStore(ARCH, home).folder.name).write_text("no folder")  # type: ignore[union-attr]
    store = CubinStore(ARCH, home)
    store.fill(NAMES)
    store.fill(NAMES)
    assert compiled == NAMES and store.known.keys() == set(NAMES)


def test_without_any_folder_too(monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    monkeypatch.setattr(cubins, "own_folder", lambda: None)
    store = CubinStore(ARCH)
    store.fill(NAMES)
    assert compiled == NAMES and store.folder is None


def test_another_source_version_or_gpu_has_another_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = CubinStore(ARCH, home).folder
    assert one == CubinStore(ARCH, home).folder and one != CubinStore((8, 0), home).folder
    monkeypatch.setattr("narrows.compression.cuda.jit.compiler_versions", lambda: ["numba-cuda 0.31"])
    assert CubinStore(ARCH, home).folder != one


def test_the_oldest_folders_go(home: Path, compiled: list[str]) -> None:
    for number in range(cubins.FOLDERS_MAX + 2):
        (home / f"cuda-90-{number}").mkdir()
    CubinStore(ARCH, home).fill(NAMES)
    assert len(list(home.glob("cuda-*"))) == cubins.FOLDERS_MAX + 1


def test_a_kernel_that_does_not_compile_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="the kernel no_such does not compile: KeyError: 'no_such'"):
        CubinStore(ARCH, home).fill(["no_such"])
    monkeypatch.setattr(cubins, "COMPILE_S", 0.0)
    with pytest.raises(RuntimeError, match="compiling kernels for sm_90 took longer than 0 s"):
        CubinStore(ARCH, home).fill(NAMES)


def test_what_ended_a_compiler_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/sh")  # it knows no -P
    with pytest.raises(RuntimeError, match="the kernel gather does not compile: the compiler has ended with 2: "):
        CubinStore(ARCH, home).fill(["gather"])


def test_a_file_system_without_locks_waits_for_nobody(
    home: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    CubinStore(ARCH, home).fill(NAMES)
    assert compiled == NAMES


def test_every_module_with_kernels_is_named() -> None:
    cubins.load_kernels()
    folder = Path(cubins.__file__).parent
    with_kernels = {
        file.stem for file in folder.glob("*.py") if "\n@kernel(" in file.read_text() or "= coding(" in file.read_text()
    }
    assert with_kernels == set(cubins.MODULES) and len(KERNELS) == 80
