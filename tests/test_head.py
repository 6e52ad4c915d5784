import pytest
import torch
from torch.testing import assert_close
from transformers import GraniteConfig, LlamaConfig, MixtralConfig, Qwen3Config

from tests.tiny import tiny_llama_config
from train.head import DraftHead, draft_config


@pytest.fixture
def head():
    torch.manual_seed(0)
    return DraftHead(draft_config(tiny_llama_config())).double().eval()


def pairs(*lengths, hidden=32):
    torch.manual_seed(1)
    total = sum(lengths)
    return torch.randn(total, hidden).double(), torch.randn(total, hidden).double()


def test_packed_documents_do_not_see_each_other(head):
    embeddings, features = pairs(7, 5)
    together = head(embeddings, features, [7, 5])
    assert_close(together[:7], head(embeddings[:7], features[:7], [7]), rtol=0, atol=1e-12)
    assert_close(together[7:], head(embeddings[7:], features[7:], [5]), rtol=0, atol=1e-12)


def test_changing_one_document_leaves_the_others_bit_equal(head):
    embeddings, features = pairs(7, 5)
    before = head(embeddings, features, [7, 5])
    features[:7] += 1.0
    after = head(embeddings, features, [7, 5])
    assert torch.equal(before[7:], after[7:]) and not torch.equal(before[:7], after[:7])


def test_a_pair_sees_no_later_pair(head):
    embeddings, features = pairs(9)
    before = head(embeddings, features, [9])
    features[6:] = 1e3
    after = head(embeddings, features, [9])
    assert torch.equal(before[:6], after[:6])


def test_the_layer_is_a_llama_layer_without_input_norm(head):
    """Transformers' own Llama layer, its input norm taken out, is the reference."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = head.config
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0).double()
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(head.layers[0].state_dict(), strict=True)
    embeddings, features = pairs(8)
    x = head.fc(torch.cat([embeddings, features], dim=-1))[None]
    rotary = LlamaRotaryEmbedding(config)(x, torch.arange(8)[None])
    causal = torch.full((8, 8), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected = layer(x, attention_mask=causal, position_embeddings=rotary)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert_close(head(embeddings, features, [8]), expected.view(8, -1), rtol=1e-6, atol=1e-6)


def test_the_embedding_half_of_fc_comes_first(head):
    embeddings, features = pairs(3)
    hidden = head.config.hidden_size
    weight = head.fc.weight
    expected = embeddings @ weight[:, :hidden].T + features @ weight[:, hidden:].T
    assert_close(head.fuse(embeddings, features), expected)


def llama2(hidden, width, layers, heads, kv_heads):
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


@pytest.mark.parametrize(
    ("target", "billions"),
    [
        (llama2(4096, 11008, 32, 32, 32), 0.24),
        (llama2(5120, 13824, 40, 40, 40), 0.37),
        (llama2(8192, 28672, 80, 64, 8), 0.99),
        (MixtralConfig(num_key_value_heads=32), 0.28),  # the published head shares no k/v heads
    ],
    ids=["llama-2-7b", "llama-2-13b", "llama-2-70b", "mixtral-8x7b"],
)
def test_parameter_counts_are_the_published_ones(target, billions):
    with torch.device("meta"):
        head = DraftHead(draft_config(target))
    count = sum(parameter.numel() for parameter in head.parameters())
    assert round(count / 1e9, 2) == billions


def test_head_dim_and_rope_come_from_the_target():
    target = Qwen3Config(
        hidden_size=2560,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config = draft_config(target)
    assert config.head_dim == 128 and config.rope_parameters["rope_theta"] == 1e6
    assert config.num_hidden_layers == 1


def test_scaled_rope_gives_the_targets_own_angles():
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = tiny_llama_config(rope_parameters=scaling)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(target).inv_freq
    assert_close(DraftHead(draft_config(target)).rotary.inv_freq, theirs)
    plain = LlamaRotaryEmbedding(tiny_llama_config()).inv_freq
    assert not torch.equal(theirs, plain)


def test_multipliers_of_the_target_are_not_the_heads():
    """Granite scales embeddings, residuals and logits; engines build a plain Llama layer."""
    target = GraniteConfig(hidden_size=64, num_attention_heads=4, embedding_multiplier=12.0)
    assert not hasattr(draft_config(target), "embedding_multiplier")
