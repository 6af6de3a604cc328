"""`source.Function.fingerprint` of every seam in the vLLM releases read so far, by patch.

Written by `python -m tests.releases`. A patch still applies to another source that has the signature and the
features, and says that the source is new.
"""

SEEN: dict[str, dict[str, str]] = {
    "publish_scope": {},
    "load_scope": {
        "608ec8f554bf": "0.26.0 to 0.29.0",
        "556b958790e7": "0.30.0, 0.31.0",
        "87074142ccc1": "0.32.0, 0.33.0",
    },
    "initialize_scope": {
        "486f7133bda5": "0.26.0 to 0.32.0",
        "7760f3b0b54d": "0.33.0",
    },
    "proposer_scope": {
        "cc17f97fb771": "0.26.0",
        "95b885c090ba": "0.27.0, 0.27.1",
        "733c0ff0c8a1": "0.28.0",
        "edbeff128abe": "0.29.0",
        "b9e46fec5953": "0.30.0 to 0.32.0",
        "c69e5fbfca19": "0.33.0",
        "16bfaaa27802": "0.26.0 to 0.29.0",
        "61721471c230": "0.30.0 to 0.33.0",
        "5c6de199a004": "0.26.0 to 0.33.0",
    },
    "extract_proposer_scope": {
        "6f807ff42064": "0.26.0 to 0.33.0",
        "0bb3bbcb7d4f": "0.26.0 to 0.33.0",
    },
    "medusa_scope": {
        "eb109064f70a": "0.26.0 to 0.32.0",
        "e1b37ac600d3": "0.26.0 to 0.32.0",
    },
    "custom_proposer_scope": {
        "3c2b29c139cc": "0.26.0 to 0.33.0",
    },
    "speculator_scope": {
        "f99b188b414a": "0.26.0 to 0.27.1",
        "cb9c5071f4a1": "0.28.0, 0.29.0",
        "899ee77b84e3": "0.30.0",
        "950c246d2896": "0.31.0 to 0.33.0",
    },
    "speculator_graphs": {
        "85b9a2d4b7c5": "0.26.0",
        "d90c91957043": "0.27.0 to 0.28.0",
        "904f9720461a": "0.29.0",
        "4e38d195e20d": "0.30.0, 0.31.0",
        "2a140bb6b146": "0.32.0, 0.33.0",
    },
    "graph_scope": {
        "73ce57825e73": "0.26.0 to 0.30.0",
        "91e46db1c5e8": "0.31.0 to 0.33.0",
        "cae947879f60": "0.26.0 to 0.31.0",
        "426fa32dc70b": "0.32.0, 0.33.0",
    },
    "breakable_graph_scope": {
        "f79d4a91582f": "0.26.0 to 0.29.0",
        "fa19a76c2770": "0.30.0",
        "cd1020ef8627": "0.31.0, 0.32.0",
        "1bb7a22f0794": "0.33.0",
        "28ae53667a13": "0.26.0 to 0.29.0",
        "8306cb783514": "0.30.0 to 0.32.0",
        "8834235dc74e": "0.33.0",
    },
    "compile_cache": {
        "a0ab15c244f0": "0.26.0",
        "9ca38dbb59fd": "0.27.0, 0.27.1",
        "29c20c020c3b": "0.28.0",
        "dc890daffd34": "0.29.0",
        "02195b0d132b": "0.30.0",
        "29c96996a5ef": "0.31.0",
        "dfaf5473ae28": "0.32.0",
        "6875ee2a4c67": "0.33.0",
    },
    "quick_reduce": {
        "a89238d97e61": "0.26.0 to 0.33.0",
    },
    "a4w4": {
        "280ce1d28859": "0.26.0 to 0.31.0",
        "743cd0e286a9": "0.32.0, 0.33.0",
    },
    "aiter_bmm": {
        "d1f3d650a476": "0.26.0 to 0.33.0",
        "28a454ec765a": "0.26.0",
        "553b81dabbe8": "0.27.0 to 0.33.0",
    },
    "marlin_input": {
        "e370e45f2514": "0.26.0 to 0.33.0",
    },
    "moe_activation": {
        "574d8e89753a": "0.26.0 to 0.33.0",
    },
    "linear_activation": {
        "3126a1406560": "0.33.0",
    },
    "online_quantization": {
        "f69e8f19ea67": "0.30.0, 0.31.0",
        "609b482ed216": "0.32.0, 0.33.0",
    },
    "draft_quantization": {
        "038cde4646db": "0.26.0 to 0.33.0",
        "f2c4ef8d42e8": "0.26.0 to 0.27.1",
    },
    "draft_dtype": {
        "283b1c041dc2": "0.26.0",
        "8ddb9810ddef": "0.27.0, 0.27.1",
        "7b36fd36cfc0": "0.28.0",
        "8614b6b3b34f": "0.29.0",
        "4357b60970a6": "0.30.0",
        "4c026a0fdd0b": "0.31.0, 0.32.0",
        "be22cba6370e": "0.33.0",
    },
    "expert_option": {
        "7f4808c1ed54": "0.26.0 to 0.28.0",
        "9bc0bc575c8c": "0.29.0",
        "4b5032da9728": "0.30.0",
        "b8f7cfbccdf0": "0.31.0 to 0.33.0",
        "283b1c041dc2": "0.26.0",
        "8ddb9810ddef": "0.27.0, 0.27.1",
        "7b36fd36cfc0": "0.28.0",
        "8614b6b3b34f": "0.29.0",
        "4357b60970a6": "0.30.0",
        "4c026a0fdd0b": "0.31.0, 0.32.0",
        "be22cba6370e": "0.33.0",
    },
    "fp8_experts": {
        "6c58b8cddcb8": "0.26.0 to 0.29.0",
        "929d240238c7": "0.30.0 to 0.33.0",
        "90ecc51aa427": "0.26.0",
        "4d75e0358fcc": "0.27.0, 0.27.1",
        "60bf6f83e496": "0.28.0 to 0.30.0",
        "1edc8410eab5": "0.31.0",
        "7dcdc7aa9cb4": "0.32.0, 0.33.0",
    },
}
