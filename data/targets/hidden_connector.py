"""vLLM's own connector for hidden states, made fit for a CPU. Only vLLM imports it, by its path."""

from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes in the engine's own thread. vLLM's copies with CUDA streams into pinned memory."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None  # set before anything is saved
        inside = torch.arange(self._block_size)
        slots = torch.tensor(pending.block_ids)[:, None] * self._block_size + inside
        states = extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids}
        save_file(tensors, pending.filename)
        # Its request is done, and get_finished lets go of the lock of its file.
        events: dict[str, Any] = self._req_copy_events
        events[pending.req_id] = _Done()


class _Done:
    """Stands for the CUDA event of a copy that has ended."""

    def query(self) -> bool:
        return True
