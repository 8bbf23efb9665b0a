"""How the library is compiled, kept and found, and what is said where it cannot be."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowprefill.host_cpu import cpu_flags
from flowprefill.native import library
from flowprefill.native.library import (
    AVX2,
    AVX512,
    Instructions,
    NativeUnavailableError,
    compile_library,
    instructions_of,
    load_library,
)
from tests.native_kernels import require_native

ALL_FLAGS = AVX2.flags | AVX512.flags
WRITES_ITS_OUTPUT = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources, and a package and a user's cache of its own to keep libraries in."""
    copy = tmp_path / "package" / "src"
    shutil.copytree(library._SOURCES, copy)
    monkeypatch.setattr(library, "_SOURCES", copy)
    monkeypatch.setattr(library, "_PACKAGE", copy.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.source_digest.cache_clear()
    yield copy
    library.source_digest.cache_clear()


def use_compiler(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that does what the shell script says."""
    compiler = directory / "my-c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return compiler


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_compiler(tmp_path, WRITES_ITS_OUTPUT, monkeypatch)


class TestCompile:
    def test_without_a_compiler_their_names_are_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        message = r"no C\+\+ compiler is installed \(c\+\+, g\+\+, clang\+\+\)"
        with pytest.raises(NativeUnavailableError, match=message):
            compile_library(AVX2, [tmp_path])

    def test_the_first_compiler_on_the_path_is_taken(
        self, tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CXX")
        compiler.rename(tmp_path / "g++")
        (tmp_path / "clang++").write_text("#!/bin/sh\nexit 1\n")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert compile_library(AVX2, [tmp_path / "kept"]).is_file()

    def test_a_compiler_that_fails_is_named_with_its_first_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = "echo 'library.cpp:1: error: no such thing' >&2; echo more >&2; exit 1"
        compiler = use_compiler(tmp_path, script, monkeypatch)
        with pytest.raises(NativeUnavailableError) as raised:
            compile_library(AVX2, [tmp_path / "kept"])
        assert str(raised.value) == f"{compiler} failed: library.cpp:1: error: no such thing"
        assert list((tmp_path / "kept").iterdir()) == []

    def test_a_compiler_that_fails_silently_is_named_with_its_exit_code(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_compiler(tmp_path, "exit 3", monkeypatch)
        with pytest.raises(NativeUnavailableError, match="failed: exit code 3"):
            compile_library(AVX2, [tmp_path / "kept"])

    def test_a_compiler_that_hangs_is_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_compiler(tmp_path, "exec /bin/sleep 100", monkeypatch)
        monkeypatch.setattr(library, "_COMPILE_TIMEOUT_S", 0.2)
        with pytest.raises(NativeUnavailableError, match="ran for"):
            compile_library(AVX2, [tmp_path / "kept"])

    def test_only_the_whole_library_is_left_in_the_directory(
        self, tmp_path: Path, compiler: Path
    ) -> None:
        path = compile_library(AVX2, [tmp_path / "kept"])
        assert path.read_text() == "built\n"
        assert list((tmp_path / "kept").iterdir()) == [path]

    def test_where_nothing_can_be_written_the_next_directory_is_taken(
        self, tmp_path: Path, compiler: Path
    ) -> None:
        blocked = tmp_path / "a-file"
        blocked.touch()
        path = compile_library(AVX2, [blocked / "lib", tmp_path / "second", tmp_path / "third"])
        assert path.parent == tmp_path / "second" and path.is_file()
        assert not (tmp_path / "third").exists()

    def test_where_no_directory_can_be_written_all_are_named(
        self, tmp_path: Path, compiler: Path
    ) -> None:
        blocked = [tmp_path / name / "lib" for name in ("one", "two")]
        for directory in blocked:
            directory.parent.touch()
        with pytest.raises(NativeUnavailableError, match=r"kept anywhere: .*one/lib.*two/lib"):
            compile_library(AVX2, blocked)

    def test_the_package_comes_before_the_users_cache(
        self, sources: Path, tmp_path: Path, compiler: Path
    ) -> None:
        assert compile_library(AVX2).parent == sources.parent / "lib"
        shutil.rmtree(sources.parent / "lib")
        (sources.parent / "lib").touch()
        assert compile_library(AVX2).parent == tmp_path / "cache" / "flowprefill" / "native"

    @pytest.mark.parametrize("setting", ["", "relative"])
    def test_without_a_usable_setting_the_cache_is_in_the_home(
        self,
        sources: Path,
        tmp_path: Path,
        compiler: Path,
        setting: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (sources.parent / "lib").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", setting)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert compile_library(AVX2).parent == tmp_path / ".cache" / "flowprefill" / "native"


class TestDigest:
    """A library is used for the sources and options that it was made of, and for no others."""

    def test_every_source_counts(self, sources: Path) -> None:
        digests = {library.source_digest(AVX2)}
        for path in sorted(sources.iterdir()):
            path.write_text(path.read_text() + "\n")
            library.source_digest.cache_clear()
            digests.add(library.source_digest(AVX2))
        assert len(digests) == 1 + len(list(sources.iterdir())) > 2

    def test_options_count(self, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = library.source_digest(AVX2)
        monkeypatch.setattr(library, "_OPTIONS", (*library._OPTIONS, "-O2"))
        library.source_digest.cache_clear()
        assert library.source_digest(AVX2) != before

    def test_each_processor_has_its_own(self, sources: Path, compiler: Path) -> None:
        paths = {compile_library(AVX512), compile_library(AVX2)}
        assert {library._find(AVX512), library._find(AVX2)} == paths
        assert len(paths) == 2

    def test_a_library_of_other_sources_is_not_found(self, sources: Path, compiler: Path) -> None:
        path = compile_library(AVX2)
        assert library._find(AVX2) == path
        header = sources / "team.h"
        header.write_text(header.read_text() + "\n")
        library.source_digest.cache_clear()
        assert library._find(AVX2) is None
        assert compile_library(AVX2) != path


class TestCpu:
    def test_missing_instructions_are_named(self) -> None:
        with pytest.raises(NativeUnavailableError, match="has no avx2, fma"):
            instructions_of(ALL_FLAGS - {"avx2", "fma"})

    @pytest.mark.parametrize(
        ("flags", "instructions"),
        [(ALL_FLAGS, AVX512), (ALL_FLAGS - {"avx512vl"}, AVX2), (AVX2.flags, AVX2)],
    )
    def test_the_widest_that_the_processor_has_whole(
        self, flags: frozenset[str], instructions: Instructions
    ) -> None:
        if platform.machine() != "x86_64":
            pytest.skip("another machine")
        assert instructions_of(flags) == instructions

    @pytest.mark.parametrize(("function", "answer"), [("machine", "aarch64"), ("system", "Darwin")])
    def test_other_machines_are_refused(
        self, function: str, answer: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(platform, function, lambda: answer)
        with pytest.raises(NativeUnavailableError, match="x86-64 Linux"):
            instructions_of(ALL_FLAGS)


class TestMain:
    def test_it_says_where_the_library_is(self) -> None:
        require_native("float32")
        said: list[str] = []
        library.main(said.append)
        assert said == [f"native CPU kernels: {library._find(instructions_of(cpu_flags()))}"]

    def test_where_there_can_be_none_it_says_why_and_does_not_fail(
        self, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_compiler(tmp_path, "echo 'error: broken' >&2; exit 1", monkeypatch)
        said: list[str] = []
        library.main(said.append)
        assert len(said) == 1 and "torch's operators are used instead" in said[0]
        if cpu_flags() >= AVX2.flags:
            assert said[0].endswith("failed: error: broken")


def test_two_who_compile_at_once_both_get_a_whole_library(tmp_path: Path, compiler: Path) -> None:
    """As if the other had been quicker."""
    kept = tmp_path / "kept"
    first = compile_library(AVX2, [kept])
    inode = first.stat().st_ino
    opened = os.open(first, os.O_RDONLY)
    assert compile_library(AVX2, [kept]) == first
    assert first.stat().st_ino != inode  # replaced, not written into: who has it open keeps it
    assert os.read(opened, 100) == b"built\n"
    os.close(opened)


ENDS_IN_THE_KERNELS = """
import threading, torch
from tests.unit.native.decoders import LAYER, make_decoder, make_spec, random_hidden
spec = make_spec(576, 9, 3, 64, 1536)
decoder = make_decoder("native", spec, torch.float32)
hidden, rows = random_hidden(spec, 600, torch.float32), decoder.rows(0, 0, 600)
q = torch.empty(600, spec.q_size)
is_running = threading.Event()
def work():
    while True:
        decoder.operators.qkv(LAYER, hidden, rows, q)
        is_running.set()
threading.Thread(target=work, daemon=True).start()
is_running.wait()
"""


def test_an_interpreter_may_end_while_a_thread_is_in_the_kernels() -> None:
    require_native("float32")
    for _ in range(3):
        subprocess.run([sys.executable, "-c", ENDS_IN_THE_KERNELS], check=True, timeout=60)


def test_a_library_that_cannot_be_loaded_is_no_library(sources: Path) -> None:
    require_native("float32")
    (sources.parent / "lib").mkdir()
    (sources.parent / "lib" / library._name(instructions_of(cpu_flags()))).write_bytes(b"damaged")
    load_library.cache_clear()
    with pytest.raises(NativeUnavailableError, match=r"damaged|too short|invalid"):
        load_library()


def test_a_compiler_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "clang++-77 -stdlib=libc++")
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler .*\(clang\+\+-77\)"):
        compile_library(AVX2, [tmp_path])


def test_the_compiler_may_have_arguments(
    tmp_path: Path,
    compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", f"{compiler} --its-option")
    assert compile_library(AVX2, [tmp_path / "kept"]).is_file()


def test_the_error_is_told_not_the_file_that_includes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "echo 'In file included from library.cpp:6,' >&2; echo 'x.h:1: error: no' >&2; exit 1"
    use_compiler(tmp_path, script, monkeypatch)
    with pytest.raises(NativeUnavailableError, match=r"failed: x.h:1: error: no"):
        compile_library(AVX2, [tmp_path / "kept"])
