"""The training loop: a feature cache in, checkpoints of a draft head out."""

import logging
import math
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data.batches import PackedBatch, add_noise, pack, prefetch, split_step
from data.cache import FeatureCache
from data.config import TargetConfig, or_known
from data.files import write_json
from data.fingerprint import fingerprint, fingerprint_differences
from data.memory import keep_freed_pages
from data.processes import runs_on_cpu
from data.target import TargetHead, load_config, read_target_head
from train.acceptance import ChainCounts, HeldoutDocument, chain_acceptance, prepare_document
from train.checkpoints import (
    best_record,
    find_resumable,
    make_record,
    note_best,
    restore,
    save_checkpoint,
)
from train.config import TrainConfig
from train.head import DraftHead, draft_config
from train.initialise import regression_init
from train.loss import LossSums, distillation_loss
from train.metrics import Metrics, describe_run
from train.plan import Step, learning_rate, plan_steps, split_cache
from train.vocabulary import frequent_head

log = logging.getLogger(__name__)
ESTIMATES_A_RUN = 10  # held-out estimates and checkpoints when save_every is null


def fit(config: TrainConfig) -> float:
    """Train a head and return the best held-out acceptance length. Collective.

    Raises ValueError for settings, cache or checkpoint that do not fit together,
    FileNotFoundError for a missing cache, RuntimeError for a loss that is not finite.
    """
    if config.tracker and find_spec(config.tracker) is None:
        raise ValueError(
            f"tracker={config.tracker} needs a package that is not installed: "
            f"pip install -e '.[{config.tracker}]'. Without it metrics.jsonl has the same numbers."
        )
    # cpu=True would switch DeepSpeed off, which finds its device by itself.
    on_cpu = runs_on_cpu() and not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    accelerator = Accelerator(
        cpu=on_cpu,
        gradient_accumulation_steps=1,
        log_with=config.tracker,
        project_dir=config.out,
    )
    keep_freed_pages(accelerator.device)
    out = Path(config.out)
    cache = FeatureCache(Path(config.features))
    training, heldout = split_cache(cache, config)
    steps = plan_steps(cache, training, config)

    target = or_known(config.target, cache.fingerprint)
    refuse_another_target(target, cache)
    target_head = read_target_head(target).to(accelerator.device)
    torch.manual_seed(config.seed)
    head = DraftHead(
        draft_config(load_config(target), intermediate_size=config.head.intermediate_size)
    ).to(accelerator.device)

    checkpoint = find_resumable(out, config, cache)
    start = int(checkpoint.name) if checkpoint else 0
    if accelerator.is_main_process:
        describe_run(config, cache, head, training, heldout, len(steps), start, accelerator)
    if start < len(steps):
        if not checkpoint and config.head.init == "regression":
            regression_init(head, target_head, cache, training)
        loss_head = target_head
        if config.loss.vocab:
            loss_head = frequent_head(target_head, cache, training, count=config.loss.vocab)
        documents = [
            prepare_document(cache.sequence(index), target_head, accelerator.device)
            for index in heldout[accelerator.process_index :: accelerator.num_processes]
        ]
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            settings = accelerator.state.deepspeed_plugin.deepspeed_config
            settings["gradient_clipping"] = config.max_grad_norm  # the engine clips by itself
            settings["train_micro_batch_size_per_gpu"] = 1  # unused: we cut batches by tokens
        head, optimizer = accelerator.prepare(head, optimizer)
        if checkpoint:
            restore(checkpoint, accelerator=accelerator, head=head, optimizer=optimizer)
        run_steps(
            accelerator,
            config,
            cache,
            target_head,
            loss_head,
            head,
            optimizer,
            documents,
            steps[start:],
        )
    else:
        log.info("%s is finished after %d steps: nothing to do.", out, start)
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.free_memory()  # but the process group stays, for the next job of a --multirun
    best = best_record(out)
    return best["acceptance_length"] if best else 1.0


def refuse_another_target(target: TargetConfig, cache: FeatureCache) -> None:
    """Raise ValueError, naming the fields, unless `target` made the features."""
    differences = fingerprint_differences(fingerprint(target), cache.fingerprint)
    if differences:
        raise ValueError(
            f"The features in {cache.path} are not those of the target {target.path}:\n  "
            + "\n  ".join(differences)
            + "\n(here: the target, there: the cache). Give the target that was dumped "
            "(target=...), or dump this one with `python -m scripts.dump_features`."
        )


def run_steps(
    accelerator: Accelerator,
    config: TrainConfig,
    cache: FeatureCache,
    target_head: TargetHead,
    loss_head: TargetHead,
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    documents: list[HeldoutDocument],
    steps: list[Step],
) -> None:
    """Train through `steps`, with an estimate and a checkpoint every now and then."""
    out = Path(config.out)
    total = steps[-1].number
    save_every = config.save_every or max(1, math.ceil(total / ESTIMATES_A_RUN))
    metrics = Metrics(out, accelerator, config, start=steps[0].number - 1, total=total)

    def load(step: Step) -> tuple[Step, list[PackedBatch]]:
        micro_batches = split_step(
            step.sequences,
            cache.lengths,
            world_size=accelerator.num_processes,
            micro_batch_tokens=config.micro_batch_tokens,
        )[accelerator.process_index]
        pin = accelerator.device.type == "cuda"
        return step, [pack(cache, sequences, pin=pin) for sequences in micro_batches]

    loaded = prefetch(steps, load)
    bar = tqdm(
        total=total,
        initial=steps[0].number - 1,
        unit="step",
        disable=None if accelerator.is_main_process else True,  # None: only on a terminal
    )
    with logging_redirect_tqdm(), bar:
        for _ in steps:
            began = time.perf_counter()
            step, micro_batches = next(loaded)
            waited = time.perf_counter() - began
            lr = learning_rate(step.number, total, config)
            for group in optimizer.param_groups:
                group["lr"] = lr
            sums, grad_norm = train_step(
                accelerator, config, cache, loss_head, head, optimizer, step, micro_batches
            )
            metrics.add(step, sums, grad_norm=grad_norm, lr=lr, began=began, waited=waited)
            bar.update()
            is_last = step.number == total
            if step.number % save_every == 0 or is_last:
                counts = None  # with heldout.share=0 nothing is known of acceptance
                if config.heldout.share > 0:
                    counts = estimate(accelerator, config, target_head, head, documents)
                    metrics.add_acceptance(step.number, counts)
                record = make_record(step.number, config, cache, counts)
                if accelerator.is_main_process and counts:
                    note_best(out, step.number, counts)
                save_checkpoint(
                    out,
                    record,
                    accelerator=accelerator,
                    head=head,
                    optimizer=optimizer,
                    keep=config.keep,
                )
            if step.number % config.log_every == 0 or is_last:
                bar.set_postfix_str(metrics.log_line(), refresh=False)


def train_step(
    accelerator: Accelerator,
    config: TrainConfig,
    cache: FeatureCache,
    loss_head: TargetHead,
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    micro_batches: list[PackedBatch],
) -> tuple[Tensor, float]:
    """Accumulate gradients over this process's `micro_batches`, then update once.

    Both loss terms are divided by the supervised pairs of all processes, so that the update does
    not depend on how the step was cut.

    returns  [3] smooth-L1, cross-entropy and agreement, means over all processes' pairs; the
             gradient's norm before clipping
    """
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    sums = torch.zeros(3, device=accelerator.device)
    for i, cpu_batch in enumerate(micro_batches):
        is_last = i == len(micro_batches) - 1
        batch = cpu_batch.to(accelerator.device)
        loss = batch_loss(accelerator, config, loss_head, head, batch, step.epoch)
        sums += torch.stack([loss.smooth_l1, loss.cross_entropy, loss.agreed.float()])
        if is_last:
            sums = accelerator.reduce(sums, "sum") / step.num_supervised
            stop_if_not_finite(sums, "loss", config, cache, step)
        accelerator.gradient_state._set_sync_gradients(is_last)  # DeepSpeed steps when it is set
        with nullcontext() if is_last or is_deepspeed else accelerator.no_sync(head):
            # DDP and ZeRO average over processes, the loss is a sum
            scale = accelerator.num_processes / step.num_supervised
            accelerator.backward(loss.loss * scale)
    norm = accelerator.clip_grad_norm_(head.parameters(), config.max_grad_norm)
    grad_norm = float(norm if norm is not None else math.nan)
    if not is_deepspeed:  # its engine has stepped already
        stop_if_not_finite(torch.tensor(grad_norm), "gradient", config, cache, step)
    optimizer.step()
    optimizer.zero_grad()
    return sums, grad_norm


def batch_loss(
    accelerator: Accelerator,
    config: TrainConfig,
    loss_head: TargetHead,
    head: torch.nn.Module,
    batch: PackedBatch,
    epoch: int,
) -> LossSums:
    """Forward one packed batch, with noise on the input features only."""
    features = add_noise(
        batch, kind=config.noise, width=config.noise_width, seed=config.seed, epoch=epoch
    )
    dtype = next(head.parameters()).dtype  # float32, or what DeepSpeed made of it
    embeddings = loss_head.embed(batch.next_ids).to(dtype)
    with accelerator.autocast():
        predicted = head(embeddings, features.to(dtype), batch.lengths)  # [T, H]
    return distillation_loss(
        predicted[batch.supervised],
        batch.target_features,
        loss_head,
        l1_weight=config.loss.l1_weight,
        ce_weight=config.loss.ce_weight,
        chunk_rows=config.loss.chunk_rows,
    )


def estimate(
    accelerator: Accelerator,
    config: TrainConfig,
    target_head: TargetHead,
    head: torch.nn.Module,
    documents: list[HeldoutDocument],
) -> ChainCounts:
    """Acceptance on the held-out documents of all processes."""
    num_steps = config.heldout.num_steps
    model: DraftHead = accelerator.unwrap_model(head)
    counts = chain_acceptance(model, target_head, documents, num_steps=num_steps)
    both = torch.stack([counts.tried, counts.accepted]).to(accelerator.device)
    tried, accepted = accelerator.reduce(both, "sum").cpu()
    return ChainCounts(tried, accepted)


def stop_if_not_finite(
    values: Tensor, what: str, config: TrainConfig, cache: FeatureCache, step: Step
) -> None:
    """Raise before the update, and leave the step's conversations in OUT/nonfinite.json."""
    if torch.isfinite(values).all():
        return
    ids = [cache.ids[index] for index in step.sequences]
    file = Path(config.out) / "nonfinite.json"
    write_json(file, {"step": step.number, "what": what, "conversations": ids})
    raise RuntimeError(
        f"The {what} of step {step.number} is not finite ({values.tolist()}). The weights before "
        f"it are unharmed. The step's {len(ids)} conversations are listed in {file}. Check the "
        f"cache, or lower lr (now {config.lr})."
    )
