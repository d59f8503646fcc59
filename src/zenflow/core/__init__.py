"""The pure vocabulary: tensors and numbers in, tensors and numbers out. No streams, no threads."""
