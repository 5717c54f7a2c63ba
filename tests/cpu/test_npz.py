"""The files of `fagen run`: round trips, and one clear sentence for every unusable file."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fagen import Attention, InputError
from fagen.npz import read, read_descales, read_inputs, write
from fagen.oracle.numeric import DTYPES


def tensors(dtype: str = "bf16", scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {n: (scale * rng.standard_normal((1, 3, 2, 8))).astype(np.float32).astype(DTYPES[dtype]) for n in "qkv"}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
def test_round_trip_is_bit_exact(dtype: str, tmp_path) -> None:
    given = tensors(dtype)
    write(tmp_path / "qkv.npz", given)
    got = read_inputs(tmp_path / "qkv.npz", Attention(head_dim=8, dtype=dtype))
    for name, x in zip("qkv", got):
        assert x.dtype == given[name].dtype and x.tobytes() == given[name].tobytes()
    with np.load(tmp_path / "qkv.npz", allow_pickle=False) as stored:  # readable without ml_dtypes
        assert stored["q"].dtype == {"fp16": np.float16, "bf16": np.uint16, "e4m3": np.uint8}[dtype]
        assert ("q_dtype" in stored.files) == (dtype != "fp16")
    assert os.listdir(tmp_path) == ["qkv.npz"]


def test_non_contiguous_and_fp32_arrays_are_written(tmp_path) -> None:
    out = tensors()["q"].transpose(0, 2, 1, 3)
    lse = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    write(tmp_path / "out.npz", {"out": out, "lse": lse})
    got = read(tmp_path / "out.npz", ("out", "lse"))
    np.testing.assert_array_equal(got["out"], out)
    np.testing.assert_array_equal(got["lse"], lse)


def test_another_dtype_needs_cast(tmp_path) -> None:
    path = tmp_path / "qkv.npz"
    given = tensors("fp32")
    write(path, given)
    with pytest.raises(InputError, match=r"qkv.npz: q is fp32, the attention's dtype is bf16; --cast converts it"):
        read_inputs(path, Attention(head_dim=8))
    for dtype in ("bf16", "fp16", "e4m3"):
        q, _, _ = read_inputs(path, Attention(head_dim=8, dtype=dtype), cast=True)
        np.testing.assert_array_equal(q, given["q"].astype(DTYPES[dtype]))


def test_a_cast_that_loses_finite_values_is_refused(tmp_path) -> None:
    path = tmp_path / "qkv.npz"
    given = tensors("fp32")
    given["k"].flat[:2] = (1e5, -1e5)
    given["v"].flat[:2] = (np.inf, np.nan)  # these are what they are
    write(path, given)
    with pytest.raises(InputError, match=r"k: 2 finite values of fp32 are beyond fp16, whose largest is 65504"):
        read_inputs(path, Attention(head_dim=8, dtype="fp16"), cast=True)
    _, _, v = read_inputs(path, Attention(head_dim=8, dtype="bf16"), cast=True)
    assert np.isinf(v.flat[0]) and np.isnan(v.flat[1])


BITS = np.zeros((1, 3, 2, 8), np.uint16)
FP16 = np.zeros((1, 3, 2, 8), np.float16)
DAMAGED = {
    "missing key": ({"q": FP16, "k": FP16}, r"has no array v; it has q, k"),
    "bits without a name": ({"q": FP16, "k": BITS, "v": FP16}, r"k is uint16, and no k_dtype says .*'bf16'"),
    "unknown name": ({"q": BITS, "q_dtype": np.array("e5m2"), "k": FP16, "v": FP16}, "q_dtype is 'e5m2'; legal: "),
    "wrong width": ({"q": BITS, "q_dtype": np.array("e4m3"), "k": FP16, "v": FP16}, "q is uint16, but q_dtype says e4m3, .* uint8"),
    "integers": ({"q": FP16.astype(np.int64), "k": FP16, "v": FP16}, "q is int64; expected a floating-point array"),
    "object array": ({"q": np.array([{}], object), "k": FP16, "v": FP16}, "array q cannot be read: "),
    "pickled name": ({"q": BITS, "q_dtype": np.array({}, object), "k": FP16, "v": FP16}, "array q cannot be read: "),
    "misspelt": (
        {"q": FP16, "k": FP16, "v": FP16, "qdescale": np.float32(2)},
        "has an array qdescale, which means nothing; known are q, k, v, q_descale",
    ),
    "nothing": ({}, "has no array q, k, v; it has none"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_unusable_content_names_file_and_key(case: str, tmp_path) -> None:
    content, text = DAMAGED[case]
    path = tmp_path / "qkv.npz"
    np.savez(path, **content)
    with pytest.raises(InputError, match=text) as error:
        read_inputs(path, Attention(head_dim=8, dtype="fp16"))
    assert error.value.argument == str(path) and "\n" not in str(error.value)


def test_unusable_files(tmp_path) -> None:
    attention, whole = Attention(head_dim=8), tmp_path / "whole.npz"
    write(whole, tensors())
    data = whole.read_bytes()
    files = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "text": b"hello\n" * 50,
        "flipped": data[:200] + bytes(80) + data[280:],
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError, match=name) as error:
            read_inputs(path, attention)
        assert "\n" not in str(error.value)
    np.save(tmp_path / "single.npy", FP16)
    for name, text in [(".", "is a folder"), ("absent.npz", "no such file"), ("single.npy", "is a single .npy array")]:
        with pytest.raises(InputError, match=text):
            read_inputs(tmp_path / name, attention)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path) -> None:
    (tmp_path / "folder.npz").mkdir()
    for path in (tmp_path / "absent" / "out.npz", tmp_path / "folder.npz"):
        with pytest.raises(InputError, match=r"cannot be written: "):
            write(path, tensors())
    with pytest.raises(InputError, match=r"^q: is float64"):
        write(tmp_path / "out.npz", {"q": np.zeros(2)})
    assert os.listdir(tmp_path) == ["folder.npz"]


def test_an_old_file_survives_a_failed_write(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.npz"
    write(path, tensors())
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(InputError, match=r"out.npz: cannot be written: No space left on device"):
        write(path, tensors(scale=2.0))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["out.npz"]


# descales -----------------------------------------------------------------------------------------------------------------

E4M3 = Attention(head_dim=8, dtype="e4m3")


def test_descales_are_optional_numbers_or_arrays(tmp_path) -> None:
    path, array = tmp_path / "qkv.npz", np.array([[0.5, 2.0]], np.float32)
    write(path, {**tensors("e4m3"), "k_descale": array})
    assert read_descales(path, E4M3).keys() == {"k_descale"}
    np.testing.assert_array_equal(read_descales(path, E4M3)["k_descale"], array)
    np.savez(path, q_descale=0.25, v_descale=array.astype(np.float64))
    with pytest.raises(InputError, match="v_descale is float64, a descale is fp32; --cast converts it"):
        read_descales(path, E4M3)
    found = read_descales(path, E4M3, cast=True)
    assert found["q_descale"] == 0.25 and found["v_descale"].dtype == np.float32
    np.savez(path, q=array)
    assert read_descales(path, E4M3) == {} == read_descales(path, Attention(head_dim=8))
    np.savez(path, q_descale=np.array([[1]]))
    with pytest.raises(InputError, match="q_descale is int64; expected a floating-point array"):
        read_descales(path, E4M3)


def test_descales_beside_16_bit_tensors_are_refused(tmp_path) -> None:
    write(tmp_path / "qkv.npz", {**tensors("bf16"), "v_descale": np.ones((1, 2), np.float32)})
    with pytest.raises(InputError, match="has a v_descale, but the attention takes bf16"):
        read_descales(tmp_path / "qkv.npz", Attention(head_dim=8))
