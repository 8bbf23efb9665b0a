import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flowprefill.errors import ModelLoadError
from flowprefill.programs import weights as weights_module
from flowprefill.programs.model_spec import ModelSpec, read_model_spec
from flowprefill.programs.weights import DecoderWeights, load_weights
from flowprefill.programs.weights_cache import WeightsCache, WeightsKey
from flowprefill.user_cache import TEMPORARY_SUFFIX
from tests.factories import write_tiny_gguf, write_tiny_model
from tests.unit.programs.test_weights import assert_same_weights

READ, FOUND = "load weights", "weights from the cache"
KEY = WeightsKey("/models/m.gguf", 10, 20, "reader 1", "bf16")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def model(tmp_path: Path, llama: Path) -> Path:
    return write_tiny_gguf(tmp_path / "m.gguf", llama, "Q8_0")


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "not" / "yet" / "there")


def load(
    model: Path,
    cache: WeightsCache | None,
    dtype: torch.dtype = torch.bfloat16,
    spec: ModelSpec | None = None,
) -> tuple[DecoderWeights, list[str]]:
    """The weights, and the stages of the load."""
    stages: dict[str, None] = {}
    weights = load_weights(
        model,
        spec or read_model_spec(model),
        dtype,
        lambda stage, fraction: stages.setdefault(stage),
        cache,
    )
    return weights, list(stages)


def files(cache: WeightsCache) -> list[Path]:
    return sorted(cache.directory.iterdir())


def change_weights(model: Path, keep_mtime: bool) -> None:
    """Zeros at the end of the last tensor: another model in a file of the same size."""
    mtime_ns = model.stat().st_mtime_ns
    content = bytearray(model.read_bytes())
    content[-64:] = bytes(64)
    model.write_bytes(content)
    mtime_ns += 0 if keep_mtime else 1
    os.utime(model, ns=(mtime_ns, mtime_ns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_found_weights_equal_the_read_ones_bit_for_bit(tmp_path, cache, tied, dtype):
    directory = write_tiny_model(tmp_path / "hf", "llama", tied=tied)
    model = write_tiny_gguf(tmp_path / "m.gguf", directory, "Q8_0")
    read, read_stages = load(model, cache, dtype)
    found, found_stages = load(model, cache, dtype)
    assert (read_stages, found_stages) == ([READ], [FOUND])
    assert_same_weights(found, read)
    assert found.embed.dtype == found.layers[2].down.dtype == dtype
    assert found.norm.dtype == found.layers[0].input_norm.dtype == torch.float32
    assert (found.lm_head is found.embed) is (read.lm_head is read.embed) is tied
    assert type(found.layers) is list and len(found.layers) == 3


def test_the_model_file_s_tensors_are_not_read_again(model, cache):
    read, _ = load(model, cache)
    change_weights(model, keep_mtime=True)  # unlike anybody who changes a model
    found, _ = load(model, cache)
    assert_same_weights(found, read)
    fresh, _ = load(model, WeightsCache(cache.directory / "other"))
    with pytest.raises(AssertionError):
        assert_same_weights(fresh, read)


def test_a_changed_model_file_is_read_and_takes_the_old_one_s_place(model, cache):
    load(model, cache)
    before = files(cache)
    change_weights(model, keep_mtime=False)
    changed, stages = load(model, cache)
    assert stages == [READ]
    assert_same_weights(changed, load(model, WeightsCache(cache.directory / "other"))[0])
    shutil.rmtree(cache.directory / "other")
    assert len(files(cache)) == 1 and files(cache) != before


def test_each_dtype_is_kept_beside_the_other(model, cache):
    for dtype in (torch.bfloat16, torch.float32):
        assert load(model, cache, dtype)[1] == [READ]
    for dtype in (torch.bfloat16, torch.float32):
        weights, stages = load(model, cache, dtype)
        assert stages == [FOUND] and weights.layers[0].qkv.dtype == dtype


def test_the_context_length_asked_for_changes_no_weight(model, cache):
    load(model, cache)
    spec = replace(read_model_spec(model), max_position_embeddings=100)
    assert load(model, cache, spec=spec)[1] == [FOUND]


def test_another_layout_is_another_key(model, cache, monkeypatch):
    load(model, cache)
    monkeypatch.setattr(weights_module, "FUSED_LAYOUT", weights_module.FUSED_LAYOUT + 1)
    assert load(model, cache)[1] == [READ]
    assert len(files(cache)) == 1


def test_a_link_to_the_model_is_the_model(tmp_path, model, cache):
    load(model, cache)
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert load(link, cache)[1] == [FOUND]


def test_a_directory_of_safetensors_is_read_as_it_is(llama, cache):
    for _ in range(2):
        assert load(llama, cache)[1] == [READ]
    assert not cache.directory.exists()


def test_without_a_cache_given_it_is_the_user_s(tmp_path, model, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load(model, None)[1] == [READ]
    assert load(model, None)[1] == [FOUND]
    assert len(list((tmp_path / "cache" / "flowprefill" / "weights").iterdir())) == 1


def test_a_model_file_that_is_not_there_is_named(tmp_path, model, cache):
    spec = read_model_spec(model)
    with pytest.raises(ModelLoadError, match=r"other\.gguf: not a readable GGUF file"):
        load_weights(tmp_path / "other.gguf", spec, torch.float32, cache=cache)


def num_mappings(file: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(file))


def test_dropped_layers_give_their_memory_back(model, cache):
    load(model, cache)
    weights, _ = load(model, cache)
    (file,) = files(cache)
    norms = []
    for num_left in (2, 1, 0):
        norms.append(weights.layers.pop(0).input_norm)  # as a program does that packs the rest
        assert num_mappings(file) == num_left + 2  # embed and lm_head
    del weights
    assert num_mappings(file) == 0


def test_a_change_in_memory_stays_in_this_process(model, cache):
    read, _ = load(model, cache)
    found, _ = load(model, cache)
    found.embed.zero_()
    assert_same_weights(load(model, cache)[0], read)


def test_the_file_is_what_safetensors_reads(cache):
    tensors = {
        "layers.0.bias": torch.randn(7).bfloat16(),  # an odd number in front of wider elements
        "layers.0.matrix": torch.randn(3, 5),
        "layers.0.other": torch.randn(5, 3).bfloat16(),
        "norm": torch.randn(5),
        "half": torch.randn(3, 3).half(),
    }
    assert cache.try_store(KEY, tensors) is None
    found = cache.load(KEY)
    stored = load_file(cache.path(KEY))
    assert found is not None and set(found) == set(stored) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and torch.equal(stored[name], tensor)
        assert found[name].dtype == tensor.dtype
    with safe_open(cache.path(KEY), framework="pt") as file:
        assert file.metadata()["path"] == KEY.path


@pytest.mark.parametrize("size", [0, 5, 8, 300, -1])
def test_a_file_cut_short_is_written_anew(model, cache, size):
    read, _ = load(model, cache)
    (file,) = files(cache)
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    again, stages = load(model, cache)
    assert stages == [READ]
    assert_same_weights(again, read)
    assert files(cache) == [file] and file.read_bytes() == whole


@pytest.mark.parametrize("header", [b"\xff", b"null", b"[]", b"{}", b"3", b"[" * 99_999])
def test_a_file_without_a_header_of_ours_is_ignored(cache, header):
    cache.directory.mkdir(parents=True)
    cache.path(KEY).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert cache.load(KEY) is None


def test_a_header_that_was_changed_anywhere_makes_the_file_no_weights(cache):
    cache.try_store(KEY, {"layers.0.down": torch.ones(2, 2), "norm": torch.ones(2)})
    whole = cache.path(KEY).read_bytes()
    end = whole.rindex(b"}")
    for place in range(end):
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        cache.path(KEY).write_bytes(changed)
        assert cache.load(KEY) is None, whole[:place]


def test_weights_of_another_key_under_this_name_are_ignored(cache):
    foreign = replace(KEY, variant="fp32")
    cache.try_store(foreign, {"embed": torch.ones(2, 2)})
    cache.path(foreign).rename(cache.path(KEY))
    assert cache.load(KEY) is None


def test_a_folder_that_cannot_be_made_costs_a_notice(tmp_path, model):
    (tmp_path / "file").write_text("")
    cache = WeightsCache(tmp_path / "file" / "weights")
    for _ in range(2):
        weights, stages = load(model, cache)
        assert len(weights.layers) == 3
        assert stages[0] == READ and len(stages) == 2
        assert stages[1].startswith("weights not kept for later loads: ")
        assert str(tmp_path / "file") in stages[1]


def test_a_folder_in_the_file_s_place_costs_a_notice(cache):
    cache.path(KEY).mkdir(parents=True)
    assert cache.load(KEY) is None
    assert str(cache.path(KEY)) in (cache.try_store(KEY, {"embed": torch.ones(2, 2)}) or "")
    assert files(cache) == [cache.path(KEY)]


def test_a_disk_with_room_for_one_of_two_writers_costs_a_notice(cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    for free, is_kept in ((31, False), (32, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(99, 0, free))
        problem = cache.try_store(KEY, {"embed": torch.ones(2, 2)})
        assert problem == (
            None if is_kept else f"{cache.directory}: 32 bytes are needed, 31 are free"
        )
        assert (cache.load(KEY) is not None) is is_kept


STORES_WHERE_WRITES_END_AT_1000_BYTES = """
import resource, sys, torch
from pathlib import Path
from flowprefill.programs.weights_cache import WeightsCache
from tests.unit.programs.test_weights_cache import KEY
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
problem = WeightsCache(Path(sys.argv[1])).try_store(KEY, {"embed": torch.ones(999, 9)})
print(problem)
"""


def test_a_write_that_fails_midway_leaves_nothing(cache):
    """In a process of its own: the limit would end this one's log too."""
    command = [sys.executable, "-c", STORES_WHERE_WRITES_END_AT_1000_BYTES, str(cache.directory)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert "File too large" in run.stdout
    assert files(cache) == [] and cache.load(KEY) is None


def test_what_can_never_be_used_again_is_removed(cache):
    tensors = {"embed": torch.ones(2, 2)}
    stale = [replace(KEY, size=11), replace(KEY, mtime_ns=21), replace(KEY, reader="reader 0")]
    kept = [KEY, replace(KEY, variant="fp32"), replace(KEY, path="/models/other.gguf", size=11)]
    for key in stale:
        cache.try_store(key, tensors)
        assert cache.load(key) is not None
    for key in kept:
        cache.try_store(key, tensors)
    assert files(cache) == sorted(cache.path(key) for key in kept)


def test_what_a_killed_writer_left_is_removed_but_not_a_live_one_s(cache):
    cache.directory.mkdir(parents=True)
    paths = [cache.path(KEY).with_suffix(f".{i}{TEMPORARY_SUFFIX}") for i in range(2)]
    for path, age_s in zip(paths, (7200, 60), strict=True):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    cache.try_store(KEY, {"embed": torch.ones(2, 2)})
    assert set(files(cache)) == {cache.path(KEY), paths[1]}


def test_loads_at_the_same_time_all_get_the_weights(model, cache):
    expected, _ = load(model, WeightsCache(cache.directory.parent / "other"))
    barrier = threading.Barrier(4)

    def load_at_once(_: int) -> tuple[DecoderWeights, list[str]]:
        barrier.wait()
        return load(model, cache)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(load_at_once, range(4)))
    for weights, stages in results:
        assert stages in ([READ], [FOUND])
        assert_same_weights(weights, expected)
    assert len(files(cache)) == 1
    assert load(model, cache)[1] == [FOUND]


def test_a_reader_sees_one_version_or_another_and_never_a_part(cache):
    def write(value: int) -> None:
        tensors = {f"layers.{i}.down": torch.full((64, 64), float(value)) for i in range(9)}
        assert cache.try_store(KEY, tensors) is None

    write(0)
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, value) for value in range(1, 40)]
        while not all(writer.done() for writer in writers):
            found = cache.load(KEY)
            assert found is not None and len(found) == 9
            assert len({float(v) for tensor in found.values() for v in tensor.unique()}) == 1
        for writer in writers:
            writer.result()
