"""Any agent program as an environment: it calls the policy through an OpenAI-compatible endpoint on this machine."""
