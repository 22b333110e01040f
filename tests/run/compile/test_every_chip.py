"""Every chip compiles the programs of a run with its default flags and without a warning, dense and
sparse.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from maxbatch.cli import main
from maxbatch.run.compile.flags import flags_of, text_of
from maxbatch.run.compile.topology import smallest_slice
from maxbatch.system.hardware.chips import TPUS
from tests.helpers.tiny import UNMEASURED

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is not installed (pip install libtpu)",
    ),
]

SMALL = (
    "dataset_type=synthetic",
    "base_num_decoder_layers=1",
    "base_emb_dim=256",
    "base_mlp_dim=256",
    "head_dim=128",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "vocab_size=512",
    "max_target_length=256",
    "dtype=bfloat16",
    "scan_layers=true",
    "per_device_batch_size=1",
)
FORMS = {
    "dense": (),
    "sparse": (
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "eval_interval=-1",
        UNMEASURED,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", TPUS)
def test_a_chip_compiles_training_and_resuming_with_its_flags_and_no_warning(
    version: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *SMALL,
        *FORMS[form],
        "--topology",
        smallest_slice(version),
        "--output",
        "saved",
        "--json",
    ]
    assert main(["compile", *arguments]) == 0
    captured = capsys.readouterr()
    assert "maxbatch: warning" not in captured.err
    assert {name.partition("-")[0] for name in json.loads(captured.out)["programs"]} >= {
        "step",
        "init",
        "checksums",
    }
    manifest = json.loads(Path("saved/manifest.json").read_text())
    assert manifest["config"]["libtpu_flags"] == text_of(flags_of(version))
