"""The batch plan as text: an equation, the numbers by name, the ramp table, the layout of one
update.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from fractions import Fraction

from rich.console import Console
from rich.table import Table
from rich.text import Text

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import OptimizerConfig
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.learning_rate import LearningRate
from maxbatch.plan.rampup import Stage
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.plan.update_settings import Decays
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal.folding import counted, folded
from maxbatch.system.terminal.terminal import PlainTable

_MOST_STAGES, _MOST_MICRO_BATCHES, _MOST_SHARDS, _MOST_UPDATES = 40, 8, 5, 16
_GAP = "..."

_STAGE_NUMBERS = (
    "threshold",
    "first_sample",
    "first_step",
    "num_steps",
    "num_samples",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "micro_batch_size_to_train_on",
    "global_batch_size",
)
# Titles, each with the names and the meaning of its numbers.
_NUMBERS = """
machine
  num_devices                    N: devices
  num_hosts                      H: hosts
  batch_shards                   parts of every micro-batch
batch
  per_device_batch_size          p: rows per device in one pass
  micro_batch_size_to_train_on   p x N: samples in one pass
  gradient_accumulation_steps    g: micro-batches per update
  global_batch_size_to_train_on  p x N x g: samples per update
  num_replicas                   groups of devices, each with its part of the batch
  per_replica_batch_size         samples of a replica per update
  tokens_per_step                token slots of an update
  padded_slots_per_step          rows of padding per update (batch_padding)
  padded_share                   their share of an update's computation
  whole_bytes_per_device         bytes of model and exact gradient that each device holds whole
pairs of prompt and response
  batch_size                     prompts per batch
  num_generations                G: responses per prompt
  effective_batch_size           pairs per batch: batch_size x G
  micro_batch_size               pairs per chunk of training
  num_micro_batches              chunks of training in one pass over the batch
  train_micro_batch_size         prompts per chunk of training
  rollout_micro_batch_size       prompts per chunk of generation
  num_iterations                 mu: passes over a batch
  num_minibatches                updates per pass
  minibatch_size                 prompts per update
  updates_per_batch              num_minibatches x num_iterations
  max_prompts_per_batch          most prompts read for a batch (filter_groups)
  off_policy_steps               s: batch k is sampled by the policy after k - s batches
  num_trainer_devices            devices that train
  num_sampler_devices            devices that sample
  rollout_data_parallelism       parts of the responses of a chunk
  rollout_tensor_parallelism     devices per copy of the sampler's weights
experts
  expert_group_size              devices that share the experts
  experts_per_device             experts per layer on a device
  expert_bytes_per_device        bytes of their weights in a device's state
  rows_per_expert_group          rows of a group in one pass
  choices_per_expert             tokens per expert of these rows, if all get equally many
long rows
  context_shards                 devices that share a row
  context_bytes_per_layer        bytes that a device receives in a layer's attention, forward, in one pass
  context_busiest_share          causal scores of the busiest of these devices, as a multiple of the mean
loading
  expansion_factor_real_data     e: one host in e loads; -1: every host
  num_loading_hosts              hosts that load data
  samples_per_host               samples per update / H
  rows_per_loading_host          rows per loading host and update
  global_batch_size_to_load      batch x e for e > 1: MaxText's nominal figure, no array has that size
pipeline
  num_pipeline_stages            S: groups of layers
  num_pipeline_microbatches      parts of a micro-batch
  pipeline_microbatch_size       samples of a part
  num_pipeline_repeats           groups of layers per stage
  pipeline_bubble                (S - 1) / (parts x repeats + S - 1): share of the time that a stage waits
eval
  eval_per_device_batch_size     rows per device in one eval pass
  eval_batch_size                samples in one eval pass
run
  total_steps                    updates
  total_samples                  samples
  total_tokens                   token slots of these samples
  samples_per_epoch              samples in one pass over the data
  steps_per_epoch                updates for one pass over the data, rounded up
  epochs                         passes over the data
  samples_left_out               samples of the stream before the end that skip_samples leaves out
ramp
  num_increments                 n: increments of the ramp, (p - start) / increment
  samples_per_increment          samples between the thresholds of two stages
  rampup_end_step                updates before the last stage
  rampup_end_sample              samples before the last stage
"""
_OF_PADDING = ("padded_slots_per_step", "padded_share")
# Meanings where samples share rows.
_PACKED = {
    "micro_batch_size_to_train_on": "p x N: rows in one pass (max_tokens_per_pass)",
    "gradient_accumulation_steps": "most passes per update: those of a sample a row",
    "micro_batch_size": "rows per chunk of training (max_tokens_per_pass)",
    "num_micro_batches": "most chunks of training in one pass over the batch",
}
# Numbers that count a whole batch, even if it is cut into mini-batches.
_OF_BATCH = (
    "gradient_accumulation_steps",
    "global_batch_size_to_train_on",
    "per_replica_batch_size",
    "samples_per_host",
)


def equation(plan: BatchPlan) -> str:
    """Returns the batch as one line, such as "64 samples per update = 16 per device x 1 device x 4
    ...".
    """
    listed = plan.manager.listed
    last = plan.stages[listed[-1]]
    if plan.rl:
        product = (
            f"{counted(plan.rl.batch_size, 'prompt')} x "
            f"{counted(plan.rl.num_generations, 'response')}"
        )
        chunks = f"{counted(plan.rl.num_micro_batches, 'chunk')} of {plan.rl.micro_batch_size:,}"
        if plan.is_packed:
            chunks = f"at most {chunks} rows that pairs share"
        updates = f"{counted(plan.rl.updates_per_batch, 'update')} per batch"
        cut = "update"
        if plan.rl.num_minibatches > 1:
            pairs = plan.rl.minibatch_size * plan.rl.num_generations
            cut, updates = "batch", f"{updates} of {counted(pairs, 'pair')}"
        return (
            f"{plan.rl.effective_batch_size:,} pairs per {cut} = {product}, in {chunks}; {updates}"
        )
    if plan.is_packed:
        passes = last.gradient_accumulation_steps
        rows = f"{number_text(last.per_device_batch_size)} rows per device"
        line = (
            f"{last.global_batch_size:,} {plan.sample}s per update, packed by their lengths into "
            f"at most {passes:,} pass{'es' * (passes > 1)} of {rows} x "
            f"{counted(plan.num_devices, 'device')}; {plan.tokens_per_step:,} slots"
        )
        return line + _ramped(plan)
    steps = counted(last.gradient_accumulation_steps, "accumulation step")
    line = (
        f"{last.global_batch_size:,} {plan.sample}s per update = "
        f"{number_text(last.per_device_batch_size)} per device x "
        f"{counted(plan.num_devices, 'device')} x {steps}; {plan.tokens_per_step:,} tokens"
    )
    return line + _ramped(plan)


def _ramped(plan: BatchPlan) -> str:
    listed = plan.manager.listed
    if len(listed) == 1:
        return ""
    first = plan.stages[listed[0]].global_batch_size
    return f"; ramped from {first:,} in {len(listed)} stages"


def render_plan(plan: BatchPlan, config: PlanConfig, model: str, console: Console) -> None:
    """Prints the whole plan: the equation, the model, every number by the name it has in JSON, the
    ramp, the rates.
    """
    console.print(Text(folded(equation(plan), 2, console.width), style="bold"))
    console.print(Text(model))
    console.print(_numbers(plan, console.width), soft_wrap=True, end="")
    try:
        rate = LearningRate.from_config(config, plan.manager)
    except ConfigError:
        rate = None  # the samples of an epoch are unknown here
    console.print()
    console.print(
        ramp_table(
            plan, rate, [name for name in Decays._fields if _is_in_tokens(config.optimizer, name)]
        )
    )
    if plan.rl and plan.rl.updates_per_batch > 1:
        console.print()
        console.print(updates_table(plan.rl))
    if plan.rl and plan.rl.off_policy_steps:
        console.print()
        console.print(versions_table(plan.rl, plan.num_devices))


def updates_table(batch: RLBatch) -> Table:
    """Returns the table of the updates on the batch of prompts that starts at samples_seen = s."""
    table = PlainTable(
        "update of batch", "pass", "mini-batch", "trains on", "pairs", justify="right"
    )
    for update in _abridged(batch.updates_per_batch, _MOST_UPDATES):
        if update is None:
            table.add_row(*[_GAP] * 5)
            continue
        iteration, part = divmod(update, batch.num_minibatches)
        first, end = (number * batch.minibatch_size for number in (part, part + 1))
        holds = (
            f"groups {first}:{end}" if batch.max_prompts_per_batch else f"stream[s+{first}:s+{end}]"
        )
        pairs = number_text(batch.minibatch_size * batch.num_generations)
        table.add_row(str(update + 1), str(iteration + 1), str(part + 1), Text(holds), pairs)
    return table


def versions_table(batch: RLBatch, num_devices: int) -> Table:
    """Returns the table of the policies that sample the first batches, and of their times on so
    many devices.
    """
    is_apart = batch.num_trainer_devices + batch.num_sampler_devices <= num_devices
    steps = batch.off_policy_steps
    table = PlainTable(
        "batch", "reads", "is sampled by", "while it trains" if is_apart else "before it trains"
    )
    count = steps + 3
    for number in _abridged(count, _MOST_UPDATES):
        if number is None:
            table.add_row(*[_GAP] * 4)
            continue
        first, end = number * batch.batch_size, (number + 1) * batch.batch_size
        reads = "the next prompts" if batch.max_prompts_per_batch else f"stream[{first}:{end}]"
        version = max(0, number - steps)
        made = f"batches 0 to {version - 1}" if version > 1 else "batch 0"
        policy = f"the policy that {made} made" if version else "the first policy"
        table.add_row(
            str(number), Text(reads), policy, f"batch {version}" if number or not is_apart else "-"
        )
    return table


def _is_in_tokens(optimizer: OptimizerConfig, decay: str) -> bool:
    """Returns whether a decay is stated in tokens, so that its value per update is worth
    printing.
    """
    name = "weight_decay_timescale" if decay == "adam_weight_decay" else f"{decay}_half_life"
    return optimizer[name] is not None


def ramp_table(
    plan: BatchPlan, rate: LearningRate | None = None, decays: Sequence[str] = ()
) -> Table:
    """Returns the table of stages; with a rate, also the rates of each stage's first and last
    update.

    `decays` are names in `Decays` to show even if no ramp changes them.
    """
    scaled = any(stage.learning_rate_scale != 1 for stage in plan.stages)
    sample, of_pairs = plan.sample, " pairs" if plan.rl else ""
    heads = ["stage", "threshold", f"from {sample}", "step", "steps", f"{sample}s"]
    heads += ["p", "g", f"micro{of_pairs}", f"global{of_pairs}"]

    # Columns that say the same of every stage are left out.
    is_ramp = len(plan.stages) > 1
    heads += ["tokens"] if is_ramp else []
    padded = any(stage.padded_slots_per_step for stage in plan.stages)
    heads += ["padded"] if padded else []
    heads += ["lr scale"] if scaled else []

    # A ramp changes decays stated in tokens, and with adam_scaling=sde those of the moments.
    changing = [
        name
        for name in Decays._fields
        if len({getattr(decays_of_stage, name) for decays_of_stage in plan.decays}) > 1
    ]
    decays = [name for name in Decays._fields if name in changing or name in decays]
    heads += [name.removeprefix("adam_") for name in decays]
    heads += ["lr first", "lr last"] if rate else []

    table = PlainTable(*heads, justify="right")
    listed = plan.manager.listed
    for place in _abridged(len(listed), _MOST_STAGES):
        if place is None:
            table.add_row(*[_GAP] * len(heads))
            continue
        index = listed[place]
        stage = plan.stages[index]
        cells = [str(index), *(number_text(getattr(stage, name)) for name in _STAGE_NUMBERS)]
        cells += [number_text(plan.tokens_of(index))] if is_ramp else []
        cells += [str(stage.padded_slots_per_step)] if padded else []
        cells += [f"{stage.learning_rate_scale:.4g}"] if scaled else []
        cells += [f"{getattr(plan.decays[index], name):.4g}" for name in decays]
        cells += _first_and_last_rate(plan, stage, rate) if rate else []
        table.add_row(*cells, style="dim" if stage.num_steps == 0 else None)
    return table


def render_layout(plan: BatchPlan, console: Console) -> None:
    """Draws the samples of every device and micro-batch, in the first and in the last stage."""
    console.print()
    if plan.is_packed:
        console.print(
            f"rows follow from the lengths of an update's {plan.sample}s: best fit over the whole "
            "batch, rows in stream order, filled pass by pass, each pass device by device"
        )
        return
    group = plan.manager.rows_per_sample
    first = "S1 is" if group == 1 else f"S1 to S{group} are the pairs of"
    if plan.rl is None and plan.sample != "sample":
        first = f"S1 is the {plan.sample}"
    cut = "one update" if plan.manager.num_minibatches == 1 else "one batch"
    console.print(
        f"{cut} from samples_seen = s on; {first} stream[s]; devices in the order of the mesh"
    )
    listed = plan.manager.listed
    for index in sorted({listed[0], listed[-1]}):
        stage = plan.stages[index]
        if len(listed) > 1:
            console.print(f"stage {index}: {stage.global_batch_size:,} {plan.sample}s per update")
        if plan.manager.num_minibatches == 1:
            console.print(_passes(stage.gradient_accumulation_steps))
        console.print(_layout_table(plan, index))


def render_frameworks(plan: BatchPlan, console: Console) -> None:
    """Prints the settings of other frameworks that give the same batch."""
    from maxbatch.plan.frameworks import settings_of

    settings = settings_of(plan)
    together = counted(plan.num_devices // plan.batch_shards, "device")
    replicas = counted(plan.batch_shards, "replica")
    table = PlainTable("in the words of", "one update", f"write there, on {replicas} of {together}")
    for row in settings:
        table.add_row(row.framework, row.update, row.settings)
        for line in row.ramp:
            table.add_row("", "", line)
    console.print()
    console.print(table)
    if len(plan.stages) > 1:
        without = [row.framework for row in settings if not row.ramp]
        console.print(f"no setting for these stages in {', '.join(without)}")


def _passes(count: int) -> str:
    """Returns which micro-batches accumulate their gradients, and which applies the update."""
    last = f"micro-batch {count - 1} {'adds its own and ' * (count > 1)}applies the update"
    before = (
        "micro-batch 0 accumulates" if count == 2 else f"micro-batches 0 to {count - 2} accumulate"
    )
    return last if count == 1 else f"{before} gradients, {last}"


def _layout_table(plan: BatchPlan, stage: int) -> Table:
    devices = plan.rl.num_trainer_devices if plan.rl else plan.num_devices
    together = devices // plan.batch_shards
    shards = _abridged(plan.batch_shards, _MOST_SHARDS)
    owners = [_GAP if shard is None else _devices(shard * together, together) for shard in shards]
    table = PlainTable("micro-batch", "holds", *owners)
    table.columns[0].justify = "right"
    for j in _abridged(plan.stages[stage].gradient_accumulation_steps, _MOST_MICRO_BATCHES):
        if j is None:
            table.add_row(*[_GAP] * (2 + len(shards)))
            continue
        first, end = (
            plan.samples_of(stage, j, 0)[0],
            plan.samples_of(stage, j, plan.batch_shards - 1)[1],
        )
        rows = plan.stages[stage].micro_batch_size_to_train_on // plan.batch_shards
        cells = [_GAP if d is None else _slots(*plan.samples_of(stage, j, d), rows) for d in shards]
        holds = f"pairs {first}:{end}" if plan.rl else f"stream[s+{first}:s+{end}]"
        table.add_row(str(j), Text(holds), *cells)
    return table


def _numbers(plan: BatchPlan, most: int) -> Text:
    """Returns every number by its name and in groups, one per line of at most `most` columns."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    title = ""
    absent = {"pipeline": plan.num_pipeline_stages == 1, "ramp": len(plan.stages) == 1}
    has_padding = any(stage.padded_slots_per_step for stage in plan.stages)
    unstated = [
        *(() if has_padding else _OF_PADDING),
        *(() if plan.samples_left_out else ("samples_left_out",)),
        *(() if plan.whole_bytes_per_device else ("whole_bytes_per_device",)),
    ]

    # A line of _NUMBERS that is not indented is the title of those below it.
    for line in _NUMBERS.strip().splitlines():
        name, meaning = line.split(maxsplit=1) if line.startswith(" ") else ("", line)
        source = next(
            (part for part in (plan, plan.experts, plan.long_rows, plan.rl) if hasattr(part, name)),
            None,
        )
        if not name:
            title = line
        elif source and not absent.get(title) and name not in unstated:
            if plan.rl:  # the run counts prompts, an update pairs
                meaning = meaning.replace(
                    "samples", "prompts" if title in ("run", "ramp") else "pairs"
                )
            if name in _OF_BATCH and plan.manager.num_minibatches > 1:
                meaning = meaning.replace("per update", "per batch")
            elif not plan.rl and plan.sample != "sample":
                meaning = meaning.replace("samples", f"{plan.sample}s").replace(
                    "rows", f"{plan.sample}s"
                )
            if plan.is_packed:
                meaning = _PACKED.get(name, meaning)
            groups.setdefault(title, []).append((name, number_text(getattr(source, name)), meaning))

    width = max(len(number) for group in groups.values() for _, number, _ in group)
    text = Text()
    for title, group in groups.items():
        text.append(f"\n{title}\n", style="bold")
        for name, number, meaning in group:
            head = f"  {name:<29}  {number:>{width}}  "
            folded = textwrap.wrap(meaning, max(20, most - len(head)))
            text.append(head).append(f"\n{' ' * len(head)}".join(folded) + "\n", style="dim")
    return text


def _first_and_last_rate(plan: BatchPlan, stage: Stage, rate: LearningRate) -> list[str]:
    if not stage.num_steps:
        return ["-", "-"]
    last = plan.manager.position_after(stage.first_step + stage.num_steps - 1)
    return [f"{rate.at(samples_seen):.2e}" for samples_seen in (stage.first_sample, last)]


def _abridged(count: int, most: int) -> list[int | None]:
    """Returns range(count); if it is longer than `most`, None replaces its middle."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _devices(first: int, count: int) -> str:
    return f"device {first}" if count == 1 else f"devices {first}-{first + count - 1}"


def _samples(first: int, end: int) -> str:
    return f"S{end}" if end - first == 1 else f"S{first + 1}-S{end}"


def _slots(first: int, end: int, rows: int) -> str:
    """Returns the samples in the slots of a device, and how many of its slots are empty."""
    empty = rows - (end - first)
    if not empty:
        return _samples(first, end)
    return f"{_samples(first, end)} + {empty} empty" if end > first else f"{empty} empty"


def number_text(value: int | float | Fraction | None) -> str:
    """Formats a number: thousands separated, a fraction as a decimal, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Fraction):
        return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.10g}"
    return f"{value:.6g}"
