"""`BeamSearchParams`: what `LLM.beam_search` takes, field for field as vLLM's users know it."""

from __future__ import annotations

from dataclasses import dataclass

from xllm_npu.state.sampling_params import SamplingParams


@dataclass(slots=True, frozen=True, kw_only=True)
class BeamSearchParams:
    beam_width: int  # beams that are followed, and returned
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # of no effect: scores are the model's own log probabilities
    length_penalty: float = 1.0  # score = cumulative logprob / length ** length_penalty; above 1 longer ones win
    include_stop_str_in_output: bool = False  # the stop token's text

    def sampling_params(self) -> SamplingParams:
        """The same wish as `SamplingParams`, which has more fields to combine it with."""
        return SamplingParams(
            use_beam_search=True, n=self.beam_width, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos,
            temperature=self.temperature, length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output, logprobs=0)
