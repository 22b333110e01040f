"""The cache of compiled programs: a damaged entry is replaced."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxbatch.run.compile.cache import use_persistent_cache


@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda content: b""]
)
def test_a_damaged_entry_is_replaced_and_named_once(
    damage: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.values["jax_compilation_cache_dir"]
    use_persistent_cache(str(tmp_path), tmp_path)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()

    def compile_anew() -> str:
        jax.clear_caches()
        jax.jit(lambda x: 3 * x + jnp.float32(5)).lower(jnp.float32(2)).compile()
        return capsys.readouterr().err

    try:
        compile_anew()
        entries = list(tmp_path.glob("*-cache"))
        assert entries
        whole = {entry: entry.read_bytes() for entry in entries}
        for entry in entries:
            entry.write_bytes(damage(whole[entry]))  # type: ignore[operator]
        assert "is damaged" in compile_anew()
        assert {entry: entry.stat().st_size > 100 for entry in entries} == dict.fromkeys(
            entries, True
        )
        assert compile_anew() == ""
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
