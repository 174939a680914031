"""What language models need besides: tokenizers, chat templates, generation, likelihoods, vocabularies."""
