"""Chat templates that behave as those of well-known families do, and tokenizers of their kinds."""

import json

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

BOS, EOS, END = "<s>", "</s>", "<|end|>"

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "smollm2": (
        "{% if messages[0].role != 'system' %}<|start|>system\nBe brief.<|end|>\n{% endif %}"
        + CHATML
    ),
    "generation_tags": (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}"
        "{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    ),
    "qwen25": (  # a default system turn, another than SmolLM2's way to write it
        "{% if messages[0].role == 'system' %}{{ '<|start|>system\n' + messages[0].content }}"
        "{% else %}{{ '<|start|>system\nBe kind.' }}{% endif %}{{ '<|end|>\n' }}"
        "{% for m in messages %}{% if m.role != 'system' or not loop.first %}"
        "{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>' + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    ),
    "llama2": (
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}"
        "{% set text = system + m.content if loop.index0 == 0 else m.content %}"
        "{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start|>' + m.role + '<|header|>\n\n' + m.content | trim + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|header|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
        "{{ m.content + eos_token }}{% else %}{{ raise_exception('Only user and assistant') }}"
        "{% endif %}{% endfor %}"
    ),
    "mistral_v3": (  # the system turn goes before the last user's, if nothing follows that
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
        "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<|start|>' + role + '\n' + m.content | trim + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
    ),
    "gemma3": (  # the system turn is a part of the first user's
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{% set prefix = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<|start|>' + role + '\n' + (prefix if loop.first else '') }}"
        "{{ m.content | trim + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{% if m.role != 'system' %}"  # leaves a system turn out
        "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "phi4": (
        "{% for m in messages %}{{ '<|start|>' + m.role + '<|header|>' + m.content + '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|header|>{% endif %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}"
        "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "no_generation_prompt": (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}"
        "{% endfor %}"
    ),
}
# Always a system turn, which holds dates.
LLAMA31 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ '<|start|>system<|header|>\n\nCutting Knowledge Date: December 2023\n' }}"
    "{{ 'Today Date: 26 Jul 2024\n\n' + system + '<|end|>' }}{% for m in rest %}"
    "{{ '<|start|>' + m.role + '<|header|>\n\n' + m.content | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|header|>\n\n' }}{% endif %}"
)
# Qwen3: thoughts are taken out of earlier replies, and put in empty before the last one.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# DeepSeek R1: a prompt opens a thought, but no text of a reply holds one.
THOUGHT_ONLY_WHEN_SERVED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}"
    "{% else %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# gpt-oss: what ends a reply is another token once more turns follow.
OTHER_END_IN_HISTORY = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|header|>' + m.content }}"
    "{{ eos_token if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|header|>{% endif %}"
)

MARKERS = [BOS, EOS, END, "<|start|>", "<|header|>", "<|user|>", "<|assistant|>"]
# Enough of each for merges across line ends, brackets and spaces, and within characters.
TEXT = [
    "yes no the cat\n\nsits on] (the mat)\n\n  Yes.\n",
    "assistant\n\nuser\n",
    "[INST] [/INST] ",
    " 👍 🙂 🎉 ≠ 世\n🙂👍",
]


def byte_level(
    template: str,
    *,
    merges: bool,
    trim_offsets: bool = False,
    rstrip: bool = False,
    special: bool = True,
    normalize: bool = False,
):
    """GPT-2's kind. Llama 3 trims its offsets; Phi 3's markers swallow the space after them; some
    of Cohere's are added tokens that are not special; Qwen composes characters (NFC)."""
    tokenizer = Tokenizer(models.BPE())
    if normalize:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if merges else 0,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 9, trainer)
    if trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return _wrap(tokenizer, template, rstrip=rstrip, special=special)


def metaspace(template: str, *, prepend: str = "first", all_bytes: bool = True):
    """Llama 2's kind: a space begins each word, also one that the text lacks at its start."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    learned.train_from_iterator(TEXT * 9, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    names = [*model["vocab"], "<unk>", *(f"<0x{b:02X}>" for b in range(256) if all_bytes)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(pair) for pair in model["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _wrap(tokenizer, template)


def _wrap(
    tokenizer: Tokenizer, template: str, *, rstrip: bool = False, special: bool = True
) -> PreTrainedTokenizerFast:
    markers = [
        AddedToken(m, normalized=False, special=special or m in (BOS, EOS), rstrip=rstrip)
        for m in MARKERS
    ]
    tokenizer.add_tokens(markers)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=template
    )
