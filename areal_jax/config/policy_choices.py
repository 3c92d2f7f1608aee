"""The choices of a policy objective: one value an axis (docs/objectives.md). objectives.py has the methods."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyChoices:
    """One combination. Numbers may also be arrays where a program computes several combinations side by side.

    A field that the others do not use keeps its value here and is not read; None = off.
    """

    ratio: str = 'token'  # | 'none' | 'sequence' | 'geometric' | 'geometric_token'
    ratio_denominator: str = 'proximal'  # | 'behavior'
    proximal: str = 'recompute'  # see proximal.py
    surrogate: str = 'clip'  # see surrogates.py
    clip_epsilon: float = 0.2
    clip_epsilon_high: float | None = None
    dual_clip: float = 3.0
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    quadratic_weight: float = 0.1
    oapl_beta: float = 1e-3
    oapl_value_beta: float = 1.0
    delight_gate: str = 'sigmoid'
    delight_temperature: float = 1.0
    delight_share: float = 0.1
    delight_mix: float = 0.5
    correction: str = 'truncate'  # | 'none' | 'mask'
    correction_level: str = 'token'  # | 'sequence' | 'geometric'
    behavior_weight_cap: float | None = None
    correction_low: float = 0.5
    correction_high: float = 5.0
    veto: float | None = None
    gate: str = 'none'  # | 'probability_shift' | 'second_moment'
    gate_threshold: float = 0.2
    advantage: str = 'group'  # see advantages.py
    deviation: str = 'population'  # | 'sample'
    discount: float = 1.0
    gae_lambda: float = 1.0
    truncated_value: str = 'zero'  # | 'last'
    value_clip: float = 0.5  # 0 = off
    whiten: str = 'none'  # | 'batch'
    aggregation: str = 'token_mean'  # see aggregation.py
    length_constant: int = 1
    entropy_coefficient: float = 0.0
    entropy_clamp: float = 0.0  # share of the vocabulary that this entropy leaves out
    kl_coefficient: float = 0.0
    kl_estimator: str = 'k3'
    kl_in: str = 'loss'  # | 'reward'
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float | None = None
    overlong_tokens: int = 0
    overlong_penalty: float = 1.0
    longest_answer: int = 1  # tokens, of the overlong penalty
    truncated_answers: str = 'trained'  # | 'masked'
    seed: int = 0  # of drawn gates

    @property
    def uses_proximal(self) -> bool:
        """Whether the loss reads log π_prox."""
        if self.ratio == 'none':
            return False
        return self.ratio_denominator == 'proximal' or self.correction != 'none' or self.veto is not None
