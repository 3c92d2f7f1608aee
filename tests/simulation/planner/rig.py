"""Settings of plans for tests, and a simulation that is arithmetic."""

from collections.abc import Callable, Mapping

from areal_jax.simulation.planner.advice import describe_lengths, make_setting
from areal_jax.simulation.planner.neighbours import Outcome, Plan, Prediction, Setting
from areal_jax.simulation.prices import H800, R1_DISTILL_1_5B


def make(devices: int = 16, answers: int = 256, lengths: str = 'lognormal(9000, 0.75)', **fields) -> Setting:
    return make_setting(devices, H800, R1_DISTILL_1_5B, describe_lengths(lengths, answers, 16), **fields)


HAND = {'generating_s': 300.0, 'training_s': 100.0, 'answer_s': 60.0}  # W_g, W_t, G


def gate_law(
    setting: Setting, generating_s: float, training_s: float, answer_s: float
) -> tuple[Callable[[Plan], Outcome], list[Plan]]:
    """(the eta law as a simulation, the plans that it was asked for): constant G, loads of device-seconds, age eta."""
    asked: list[Plan] = []

    def simulate(plan: Plan) -> Outcome:
        asked.append(plan)
        train_s, work_s = training_s / plan.training, generating_s / (plan.engines * setting.engine_devices)
        period_s = max(train_s, work_s, (answer_s + train_s) / (plan.eta + 1))
        return Outcome(
            period_s, setting.answers.tokens / period_s, work_s / period_s, train_s / period_s, plan.eta, plan.eta
        )

    return simulate, asked


def predict_law(setting: Setting, plan: Plan, slowdown: float = 1.0, hand: Mapping[str, float] = HAND) -> Prediction:
    """The law of HAND as a closed form."""
    simulate, _ = gate_law(setting, **{**hand, 'generating_s': slowdown * hand['generating_s']})
    found = simulate(plan)
    return Prediction(
        found.period_s, found.engines_busy * found.period_s, found.learner_busy * found.period_s, 0.0, 1.0, plan.eta
    )
