"""Log-probability and entropy of action rows, without a full logits tensor."""

from tree_kernels.logprob.op import action_logprobs

__all__ = ["action_logprobs"]
