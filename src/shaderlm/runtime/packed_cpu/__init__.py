"""Steps on the CPU with weights as they are stored, by onnxruntime. `runner.py` is the way in."""
