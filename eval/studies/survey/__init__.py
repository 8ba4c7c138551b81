"""Every mechanism on small tasks of the Long Range Arena, side by side: see `eval.studies.survey.main`."""
