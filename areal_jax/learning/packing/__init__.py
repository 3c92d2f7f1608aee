"""Groups become rows of a fixed shape, without padding to the longest. numpy only."""
