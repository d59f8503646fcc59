"""How property tests run: without a deadline, which a loaded machine would miss by itself."""

from hypothesis import settings

settings.register_profile("zenflow", deadline=None)
settings.load_profile("zenflow")
