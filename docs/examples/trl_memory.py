"""The memory in TRL: part of each batch of `GRPOTrainer` are stored prompts. Experimental; no Ray, no RLlib. Copy it.

    memory = SRLReplayBuffer(directory="memory", model_dir=Path(model))              a later run goes on with it
    MemoryGRPOTrainer(memory, train_dataset, model=model, reward_funcs=..., args=...).train()

The settings of the memory say how many prompts are revisits and which. A row of the data set is a prompt: its values
must be JSON, its column `domain`, if there is one, is the domain. Stored rows that a later data set lacks are added to
it, for revisits only. The loader reads a batch ahead: a prompt comes back two batches later at the earliest. A resumed
trainer reads fresh prompts in a new order; the memory goes on. Stored groups have no log-probs: they are not for reuse.
"""

import inspect
import itertools
import json
from collections import deque

import numpy as np
import torch
import trl
from datasets import Dataset, concatenate_datasets

from rllib_srl.memory import SRLReplayBuffer
from rllib_srl.types import Group, Prompt, StopReason

HOOKS = {"_get_train_sampler": "dataset", "_calculate_rewards": "inputs prompts completions completion_ids_list"}
OF_SAMPLER = {"num_samples", "batch_size", "mini_repeat_count", "repeat_count", "shuffle", "seed"}


class MemorySampler(torch.utils.data.Sampler):
    """TRL's sampler `base`; of each batch `share` of the prompts come from `trainer.draw`."""

    def __init__(self, base, share: float, trainer) -> None:
        if missing := sorted(OF_SAMPLER - vars(base).keys()):
            raise RuntimeError(f"the sampler of trl {trl.__version__} lacks {missing}; expected trl 1.16")
        self.base, self.share, self.trainer, self.fresh, self.num_due = base, share, trainer, self.order(), 0.0

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self):
        base, num = self.base, self.base.batch_size
        for _ in range(base.num_samples // num):
            self.num_due = self.num_due % 1 + num * self.share + 1e-9  # fractions are carried over
            fresh = list(itertools.islice(self.fresh, num - int(self.num_due)))
            batch = fresh + self.trainer.draw(int(self.num_due), fresh)
            batch += itertools.islice(self.fresh, num - len(batch))  # the memory has fewer
            yield from np.tile(np.repeat(batch, base.mini_repeat_count), base.repeat_count).tolist()

    def order(self):
        generator, num = np.random.default_rng([self.base.seed, self.trainer.state.global_step]), self.base.num_samples
        while True:
            yield from generator.permutation(num).tolist() if self.base.shuffle else range(num)


class MemoryGRPOTrainer(trl.GRPOTrainer):
    """`GRPOTrainer` whose prompts come in part from `memory`, where its groups are stored and graded."""

    def __init__(self, memory: SRLReplayBuffer, train_dataset: Dataset, **kwargs) -> None:
        for name, expected in HOOKS.items():
            hook = getattr(trl.GRPOTrainer, name, None)
            if hook is None or list(inspect.signature(hook).parameters)[1:] != expected.split():
                raise RuntimeError(f"GRPOTrainer of trl {trl.__version__} lacks {name}({expected}); expected trl 1.16")
        stored = {prompt.key: prompt for prompt in map(memory.tables.prompt_of, memory.tables.slots().tolist())}
        if {prompt.env_id for prompt in stored.values()} - {"trl"}:
            raise ValueError("expected a memory of TRL's prompts alone")
        self.memory, self.columns, self.num_fresh = memory, sorted(train_dataset.column_names), len(train_dataset)
        self.keys = [self.prompt_of(row).key for row in train_dataset]
        if old := {key: json.loads(stored[key].prompt_id) for key in stored.keys() - set(self.keys)}:
            if wrong := [sorted(row) for row in old.values() if sorted(row) != self.columns]:
                raise ValueError(f"the data set has the columns {self.columns}, a row of the memory {wrong[0]}")
            rows = Dataset.from_list([old[key] for key in sorted(old)], train_dataset.features)
            train_dataset, self.keys = concatenate_datasets([train_dataset, rows]), self.keys + sorted(old)
        super().__init__(train_dataset=train_dataset, **kwargs)
        if self.accelerator.num_processes > 1:
            raise ValueError(f"{self.accelerator.num_processes} processes; expected one: the memory is in one process")
        self.args.ignore_data_skip = True  # a draw is never thrown away
        self.rows = {key: number for number, key in enumerate(self.keys)}
        self.now = int(memory.tables.items["last_review"][memory.tables.slots()].max(initial=0))

    def prompt_of(self, row) -> Prompt:
        text = json.dumps({name: row[name] for name in self.columns}, sort_keys=True)
        return Prompt("trl", text, str(row.get("domain") or ""))

    def _get_train_sampler(self, dataset=None) -> MemorySampler:
        self.drawn = deque()  # of each batch that is read and not yet played, the keys of its revisits
        base = super()._get_train_sampler(range(self.num_fresh))
        return MemorySampler(base, self.memory.settings.revisit_fraction, self)

    def draw(self, num: int, fresh: list[int]) -> list[int]:
        prompts = self.memory.draw_prompts(num, self.now + 1, without={self.keys[row] for row in fresh}) if num else []
        self.drawn.append({prompt.key for prompt in prompts})
        return [self.rows[prompt.key] for prompt in prompts]

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            total_N = (rewards * self.reward_weights.to(rewards.device)).nansum(1).cpu().numpy().astype(np.float32)
            graded_N = np.flatnonzero(~rewards.isnan().all(1).cpu().numpy())  # by one function at least
            self.now, revisits, size = self.now + 1, self.drawn.popleft(), self.num_generations
            parts = np.split(graded_N, np.searchsorted(graded_N, range(size, len(inputs), size)))
            played = inputs, prompts, completion_ids_list, total_N
            self.memory.add([self.group_of(part_G, *played) for part_G in parts if len(part_G)], self.now)
            for name, value in (("items", len(self.memory)), ("revisit_share", len(revisits) * size / len(inputs))):
                self._metrics["train"][f"memory/{name}"].append(value)
        return rewards

    def group_of(self, part_G: np.ndarray, inputs, prompts, answers: list[list[int]], total_N: np.ndarray) -> Group:
        first, prompt = part_G[0], prompts[part_G[0]]
        if not isinstance(prompt, str):
            prompt = self.processing_class.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        asked = self.processing_class(text=prompt)["input_ids"] or [0]
        tokens, ends = [[*asked, *answers[at]] for at in part_G], {*self.eos_token_ids}
        return Group(
            group_id=f"{self.now}.{first}", prompt=self.prompt_of(inputs[first]), rewards_G=total_N[part_G],
            token_ids_N=np.concatenate(tokens).astype(np.int32), offsets=np.cumsum([0, *map(len, tokens)]),
            loss_mask_N=np.concatenate([np.arange(len(one)) >= len(asked) for one in tokens]),
            behaviour_logp_N=np.zeros(sum(map(len, tokens)), np.float32),
            versions_G2=np.full((len(part_G), 2), self.now - 1),
            stop_reasons=tuple(StopReason("terminated" if one[-1] in ends else "out_of_tokens") for one in tokens),
        )  # fmt: skip
