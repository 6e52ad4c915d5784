"""What fc reads: token, feature, or both, the ablation of EAGLE's section 4.3.2."""

import json
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_llama_config
from train.config import ExportConfig, HeadConfig, HeldoutConfig, TrainConfig
from train.fit.checkpoints import find_checkpoint, load_head
from train.fit.loop import fit
from train.head import DraftHead, draft_config
from train.serve.export import export


@pytest.mark.parametrize(
    ("inputs", "reads_token", "reads_feature"),
    [("feature_token", True, True), ("token", True, False), ("feature", False, True)],
)
def test_a_head_reads_what_it_is_named_after(inputs, reads_token, reads_feature):
    torch.manual_seed(0)
    head = DraftHead(draft_config(tiny_llama_config(), inputs=inputs))
    embeddings, features, other = (torch.randn(7, 32) for _ in range(3))
    before = head(embeddings, features, [7])
    assert torch.equal(head(other, features, [7]), before) != reads_token
    assert torch.equal(head(embeddings, other, [7]), before) != reads_feature


@pytest.mark.parametrize("init", ["random", "regression"])
@pytest.mark.parametrize("inputs", ["token", "feature"])
def test_the_ablations_train_are_measured_and_not_exported(cache_path, tmp_path, inputs, init):
    config = TrainConfig(
        features=str(cache_path),
        out=str(tmp_path / "run"),
        head=HeadConfig(inputs=inputs, init=init),
        max_steps=12,
        batch_tokens=1000,
        lr=3e-3,
        unroll=2,
        save_every=6,
        heldout=HeldoutConfig(share=0.2),
    )
    assert fit(config) >= 1.0
    rows = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").open()]
    losses = [row["smooth_l1"] for row in rows if "smooth_l1" in row]
    assert losses[-1] < losses[0] or init == "regression"  # which starts where it cannot fall much
    assert sum("heldout" in row for row in rows) == 2
    head, _ = load_head(find_checkpoint(Path(config.out)))
    assert head.inputs == inputs and head.fc.in_features == 32
    with pytest.raises(ValueError, match=rf"head\.inputs={inputs}.*head\.inputs=feature_token"):
        export(ExportConfig(checkpoint=config.out))


def test_the_usual_head_has_no_such_key_in_its_config():
    assert not hasattr(draft_config(tiny_llama_config()), "head_inputs")
