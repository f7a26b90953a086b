"""Build helpers of santa_torch, used by setup.py only; never installed."""
