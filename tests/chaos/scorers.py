KIND = 'scorer'


def scorer_cases():
    return []
