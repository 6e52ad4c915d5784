"""Decodes prompts with SGLang's own scheduler and EAGLE worker, in this process, greedily.

Runs in SGLang's Python: `python -m train.serve.sglang_cpu.decode REQUEST RESULT`, both JSON files,
for `train/serve/engine_sglang.py`, which says what they hold. There is no server and no second
process: this file hands requests to the scheduler and turns its loop itself.
"""

import json
import sys
import time
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from train.serve.sglang_cpu import kernels, stand_ins
from train.serve.sglang_cpu.load import server_args

SLOTS = 8192  # of the key and value buffers: tokens of all requests that run at once, and drafts


def main() -> None:
    request_file, result_file = map(Path, sys.argv[1:])
    request = json.loads(request_file.read_text(encoding="utf-8"))
    stand_ins.install()
    watch = Watch(request["tensors"])
    scheduler = start(request)
    began = time.perf_counter()
    answers = decode(scheduler, request, watch)
    seconds = time.perf_counter() - began
    watch.save()
    import sglang

    result = {"version": sglang.__version__, "seconds": seconds, "answers": answers}
    result_file.write_text(json.dumps(result), encoding="utf-8")


def start(request: dict[str, Any]) -> Any:
    """SGLang's scheduler with target and, if the request has one, head."""
    speculation: dict[str, Any] = {}
    if request["head"]:
        speculation = {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": request["head"],
            "speculative_num_steps": request["num_steps"],
            "speculative_eagle_topk": request["topk"],
            "speculative_num_draft_tokens": request["num_draft_tokens"],
            "speculative_token_map": request["token_map"],
        }
    args = server_args(
        request["target"],
        request,
        **speculation,
        disable_radix_cache=True,  # every prompt is computed whole
        disable_overlap_schedule=True,  # a step's result is known when it returns
        max_total_tokens=SLOTS,
        max_running_requests=request["batch_size"],
        context_length=request["context_length"],
    )
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs

    scheduler = Scheduler(args, PortArgs.init_new(args))
    torch.set_num_threads(1)
    return scheduler


def decode(scheduler: Any, request: dict[str, Any], watch: "Watch") -> list[dict[str, Any]]:
    """Answer all prompts, `batch_size` of them at once.

    Of each: `tokens`; `accepted`, the draft tokens accepted in each round, before the answer is
    cut; and `rounds`, the trees.
    """
    answers = []
    prompts, size = request["prompts"], request["batch_size"]
    for first in range(0, len(prompts), size):
        requests = [
            submit(scheduler, ids, request, number)
            for number, ids in enumerate(prompts[first : first + size], start=first)
        ]
        rounds: dict[str, list[dict[str, Any]]] = {item.rid: [] for item in requests}
        with torch.inference_mode():
            while not all(item.finished() for item in requests):
                for rid, tree in step(scheduler, watch):
                    rounds[rid].append(tree)
        for item in requests:
            trees = rounds[item.rid]
            accepted = [len(tree["path"]) for tree in trees]
            length = item.finished_len if item.finished_len is not None else len(item.output_ids)
            tokens = list(item.output_ids)[:length]
            answers.append({"tokens": tokens, "accepted": accepted, "rounds": trees})
    return answers


def submit(scheduler: Any, ids: list[int], request: dict[str, Any], number: int) -> Any:
    """Queue one prompt, as the tokenizer process would, and return SGLang's record of it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(
        max_new_tokens=request["max_new_tokens"],
        temperature=0.0,
        stop_token_ids=request["stop_ids"],
        ignore_eos=not request["stop_ids"],
    )
    sampling.normalize(None)
    scheduler.handle_generate_request(
        TokenizedGenerateReqInput(
            rid=f"prompt-{number}",
            input_text=None,
            input_ids=array("q", ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
    )
    return scheduler.waiting_queue[-1]


def step(scheduler: Any, watch: "Watch") -> Iterator[tuple[str, dict[str, Any]]]:
    """One turn of the scheduler's loop. Yields the trees that it verified, and whose they are."""
    plan = scheduler.get_next_batch_to_run(
        running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
    )
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
    if batch:
        names = [item.rid for item in batch.reqs]  # finished ones leave the batch afterwards
        result = scheduler.run_batch(batch)
        scheduler.process_batch_result(batch, result)
        if trees := watch.take_trees():
            yield from zip(names, trees, strict=True)
    scheduler.last_batch = batch


class Watch:
    """Looks over SGLang's shoulder: what enters its verification, and its draft model.

    Made before SGLang imports the functions that it wraps.
    """

    def __init__(self, file: str | None) -> None:
        self._file = file  # where the draft model's inputs and outputs go, if anywhere
        self._trees: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}
        verify = kernels.verify_tree_greedy_cpu

        def verify_and_tell(**arguments: Tensor) -> None:
            verify(**arguments)
            self._trees = list(_trees(**arguments))

        kernels.verify_tree_greedy_cpu = verify_and_tell  # type: ignore[assignment]
        if file:
            self._watch_drafts()

    def take_trees(self) -> list[dict[str, Any]]:
        """The trees of the newest verification, one for each request of the batch."""
        trees, self._trees = self._trees, []
        return trees

    def save(self) -> None:
        if self._file:
            save_file(self._tensors, self._file)

    def _watch_drafts(self) -> None:
        from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle

        forward = LlamaForCausalLMEagle.forward
        calls = count()

        def forward_and_tell(
            model: Any, input_ids: Tensor, positions: Tensor, batch: Any, *rest: Any, **more: Any
        ) -> Any:
            given = {
                "input_ids": input_ids,
                "positions": positions,
                "features": batch.spec_info.hidden_states,
            }
            kept = {name: tensor.clone() for name, tensor in given.items()}
            output = forward(model, input_ids, positions, batch, *rest, **more)
            kept |= {"logits": output.next_token_logits, "hidden": output.hidden_states}
            prefix = f"{next(calls):05d}.{batch.forward_mode.name}"
            self._tensors |= {
                f"{prefix}.{name}": tensor.clone().contiguous() for name, tensor in kept.items()
            }
            return output

        LlamaForCausalLMEagle.forward = forward_and_tell


def _trees(
    *,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    **unused: Tensor,
) -> Iterator[dict[str, Any]]:
    """The trees of a batch: tokens, parents (-1: none), accepted nodes without the root."""
    num = candidates.shape[1]
    for b, tokens in enumerate(candidates.tolist()):
        parents = [-1] * num
        for node, child in enumerate(retrive_next_token[b].tolist()):
            while child != -1:
                parents[child] = node
                child = int(retrive_next_sibling[b, child])
        path = accept_index[b, 1 : int(accept_token_num[b]) + 1] - b * num
        yield {"tokens": tokens, "parents": parents, "path": path.tolist()}


if __name__ == "__main__":
    main()
