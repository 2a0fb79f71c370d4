"""RLOO (arXiv 2402.14740) from outside, with algo.policy_loss = "none", and a metric of a step."""


def rloo(reward_PG, sampled_tokens_PG):
    """Compares each response with the mean of the others of its group (section 2.3)."""
    others_PG = reward_PG.sum(axis=1, keepdims=True) - reward_PG
    return reward_PG - others_PG / (reward_PG.shape[1] - 1)


def reward_spread(step):
    """Averages over the groups what lies between the best and the worst reward."""
    return (step.reward_PG.max(axis=1) - step.reward_PG.min(axis=1)).mean()
