"""Generation engines: what samples from a policy's weights.

    protocol     what an external engine has to offer
    in_process   samples with the policy's own module, in this process
    vllm         vLLM as an external engine; vllm_worker is its half inside vLLM
    fake         an external engine over an emulated device, for tests

Knows nothing of sessions or budgets.
"""

from __future__ import annotations

from rl_session.generation.in_process import InProcessEngine
from rl_session.generation.protocol import GenerationEngine
from rl_session.generation.vllm import VLLMEngine

__all__ = ["GenerationEngine", "InProcessEngine", "VLLMEngine"]
