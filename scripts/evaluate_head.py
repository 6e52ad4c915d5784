"""Measure an exported head: acceptance and tokens/s, against plain decoding."""

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import EvaluateConfig


@hydra.main(config_name="evaluate_head", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: EvaluateConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.measure.evaluate import evaluate
    from train.measure.report_text import table
    from train.serve.folder import RECORD
    from train.serve.model_card import measured_tree, serve_command, write_card

    report = evaluate(config)
    print(f"\n{table(report)}\n")
    print(f"written to {report['out']}: report.txt, report.json, report.html, answers.jsonl")
    head, target = Path(config.head), config.target.path
    if not (head / RECORD).is_file():
        return  # somebody else's head, or a checkpoint: engines may want it otherwise
    if Path(report["out"]) == head / "evaluation":
        write_card(head, target)
    steps = report["settings"]["drafting"]["num_steps"]
    tree = measured_tree(head)
    engine = report["head"]["engine"]
    print(f"serve with {serve_command(head, target, engine, num_steps=steps, tree=tree)}")


if __name__ == "__main__":
    prepare("evaluate_head", EvaluateConfig)
    main()
