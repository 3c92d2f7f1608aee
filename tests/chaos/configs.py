KIND = 'config'


def config_cases():
    return []
