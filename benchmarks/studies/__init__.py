"""Studies on pretrained weights: experts trained here, merged, repaired and scored with intervals.

Each module is one study and runs as a script, such as `python -m benchmarks.studies.minilm --folder kept`.
"""
