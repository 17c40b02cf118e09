"""Sends the numbers of a training log to TensorBoard, Weights & Biases and MLflow."""
