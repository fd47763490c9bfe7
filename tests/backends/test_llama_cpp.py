"""llama.cpp's C API: only the build that it was declared for is loaded."""

from __future__ import annotations

import _ctypes
import ctypes
import shutil

import pytest

from cached_rag.backends.llama_cpp import api
from cached_rag.errors import MissingPackageError, ModelError


def installed(folder, version, *files):
    """A distribution as pip leaves it."""
    facts = folder / f"{api.PACKAGE}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {api.PACKAGE}\nVersion: {version}\n"
    )
    (facts / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.mark.parametrize(
    ("version", "files", "error", "message"),
    [
        (api.BUILD, (), MissingPackageError, r"\[llama-cpp\]"),
        ("2027.1.1", ("any.so", "any.pyd"), ModelError, "it is xllamacpp 2027.1.1"),
        (api.BUILD, ("any.so", "any.pyd"), ModelError, "it has no function llama_"),
    ],
)
def test_only_the_pinned_build_is_loaded(version, files, error, message, tmp_path, monkeypatch):
    installed(tmp_path, version, *files)
    for file in files:  # a library that is not llama.cpp
        shutil.copy(_ctypes.__file__, tmp_path / file)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=message):
        api.load.__wrapped__()


def test_structs_have_the_builds_sizes_and_other_defaults_are_noticed():
    sizes = {api.ModelParams: 80, api.ContextParams: 168, api.BatchStruct: 56}
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
    assert "n_batch = 0" in api.unlike_defaults(api.ContextParams(n_ctx=512))
    assert "lazy_mode = 0" in api.unlike_defaults(api.ModelParams(n_gpu_layers=-1))


@pytest.mark.real
def test_the_pinned_build_is_as_declared():
    library = api.load()
    assert library is api.load()
    params = api.default_params(library, api.ContextParams)
    assert (params.n_ctx, params.type_v, params.swa_full, params.ctx_other) == (512, 1, True, None)
    params.n_ctx = 5
    assert api.unlike_defaults(params) == "n_ctx = 5"
