"""Batch inference: a checkpoint's outputs for all samples of a data set, each exactly once."""
