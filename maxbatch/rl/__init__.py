"""Reinforcement learning: GRPO post-training on prompts whose responses are scored by functions.

A prompt's way: `prompts` (by `templates`; `arithmetic` is the task that needs no download) -> `rollout` (responses) ->
`rewards` (by `reward_functions`) -> `collecting` (chunks of pairs) -> `learner` (the update, for
`objective`) -> `loop`, which also asks `evaluation`. `run` puts them together, after `warm_start`; `timeline` watches.
"""
