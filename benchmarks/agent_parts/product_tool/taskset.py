"""The questions, their tool, and the reward: 1 for an answer whose last integer is the product."""

from __future__ import annotations

import random
import re

import verifiers.v1 as vf
from product_tool.tool import CalculatorToolset


class ProductData(vf.TaskData):
    """A question and its answer."""

    answer: int


class ProductTask(vf.Task[ProductData]):
    """One question."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        found = re.findall(r'-?\d+', str(trace.last_message.content or ''))
        return float(bool(found) and int(found[-1]) == self.data.answer)


class ProductConfig(vf.TasksetConfig):
    """How many questions, and of how large numbers."""

    num_tasks: int = 200
    largest: int = 99
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    """Seeded: the same questions in every process."""

    @classmethod
    def toolsets(cls, config: ProductConfig) -> list[vf.Toolset]:
        """One server for all episodes: a process of it costs some seconds."""
        return [CalculatorToolset(config.tools)]

    def load(self) -> list[ProductTask]:
        draw, tasks = random.Random(0), []
        for _ in range(self.config.num_tasks):
            a, b = (draw.randint(2, self.config.largest) for _ in range(2))
            data = ProductData(prompt=f'What is {a} * {b}?', answer=a * b)
            tasks.append(ProductTask(data, self.config.task))
        return tasks
