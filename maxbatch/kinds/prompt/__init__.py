"""Reinforcement learning: GRPO post-training on prompts, with responses scored by functions.

A prompt (`prompts`, by `templates`; `ready_tasks` need no download) passes `rollout` (responses),
`rewards` (by `reward_functions`), `collecting` (chunks of pairs) and `learner` (the update, for
`objective`). `run` makes them the task of a `maxbatch.run.session`, after `warm_start`.
`evaluation` measures the policy, and `timeline` the time of each side.
"""
