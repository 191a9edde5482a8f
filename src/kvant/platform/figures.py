"""Text of the figures about a format, so that commands, `probe` and warnings show the same.

mean KL      divergence of the predictions from raw's, in nats, the mean over positions
top-1        share of positions whose most likely token stays that of raw
recall       share of questions about the text that are answered right
recall lost  loss in the probability of these answers, against raw
of raw       bytes, as a share of those of a raw cache
"""

from __future__ import annotations


def format_kl(kl: float) -> str:
    return f"{kl:.2g}"


def format_top1(share: float) -> str:
    return f"{share:.1%}"


def format_lost(lost: float) -> str:
    """Format the recall lost; a gain is noise."""
    return f"{max(lost, 0):.1%}"


def format_of_raw(share: float) -> str:
    return f"{share:.2f}"


def describe_predictions(mean_kl: float, top1: float, max_kl: float) -> str:
    """Say how often predictions differ from raw's, with the mean KL and its limit."""
    return (
        f"the most likely token differs at {1 - top1:.1%} of positions "
        f"(mean KL {format_kl(mean_kl)}, limit {format_kl(max_kl)})"
    )


def describe_recall(recalled: float, lost: float, max_lost: float) -> str:
    """Say how much recall is lost; `recalled` is the probability of an answer with raw."""
    return (
        f"recall lost {format_lost(lost)} (limit {format_lost(max_lost)}): what the text says is "
        f"repeated with a probability of {recalled - lost:.1%}, and with raw of {recalled:.1%}"
    )
