"""Play rounds of a chain with given acceptance rates, and compare with the formula for τ."""

import hydra
from omegaconf import DictConfig, OmegaConf

from conf import HYDRA, prepare, task
from train.config import SimulateConfig


@hydra.main(config_name="simulate_acceptance", **HYDRA)
@task
def main(cfg: DictConfig) -> None:
    config: SimulateConfig = OmegaConf.to_object(cfg)  # type: ignore[assignment]

    from train.decode.simulate import expected_length, simulated_length

    alphas = config.alphas
    played = simulated_length(alphas, rounds=config.rounds, seed=config.seed)
    print(f"acceptance rates α        {', '.join(f'{alpha:g}' for alpha in alphas)}")
    print(f"τ = 1 + Σ Π α             {expected_length(alphas):.3f} tokens a round")
    print(f"{config.rounds:,} rounds played    {played:.3f}")


if __name__ == "__main__":
    prepare("simulate_acceptance", SimulateConfig)
    main()
