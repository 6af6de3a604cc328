"""FP8-resident MTP experts: storage, loading, the vLLM quant method, the custom op."""
