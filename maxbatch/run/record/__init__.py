"""The record of a run: metrics, TensorBoard, trackers, progress, throughput, profiles."""
