"""Names of datasets, to recognise a misspelt ``data.dataset`` before a launch; the trainer has the readers."""

from __future__ import annotations

import difflib

OWN = ("synthetic", "synthetic-hetero", "file", "tables", "partition")  #: as in ``trainer.data.options``

OGB = ("ogbn-arxiv", "ogbn-mag", "ogbn-papers100M", "ogbn-products", "ogbn-proteins")

#: Classes of ``torch_geometric.datasets`` in version 2.8.
TORCH_GEOMETRIC = tuple(
    """
    AMiner AQSOL Actor AirfRANS Airports Amazon AmazonBook AmazonProducts AttributedGraphDataset BA2MotifDataset
    BAMultiShapesDataset BAShapes BitcoinOTC BrcaTcga CWQDataset CitationFull CityNetwork CoMA Coauthor CoraFull
    CornellTemporalHyperGraphDataset DBLP DBP15K DGraphFin DeezerEurope DynamicFAUST EllipticBitcoinDataset
    EllipticBitcoinTemporalDataset EmailEUCore Entities ExplainerDataset FAUST FB15k_237 FacebookPagePage
    FakeDataset FakeHeteroDataset Flickr GDELT GDELTLite GEDDataset GNNBenchmarkDataset GemsecDeezer
    GeometricShapes GitHub GitMolDataset GraphLandDataset HGBDataset HM HeterophilousGraphDataset HydroNet ICEWS18
    IGMCDataset IMDB InfectionDataset InstructMolDataset JODIEDataset KarateClub LINKXDataset LRGBDataset LastFM
    LastFMAsia MD17 MNISTSuperpixels MalNetTiny MedShapeNet MixHopSyntheticDataset ModelNet MoleculeGPTDataset
    MoleculeNet MovieLens MovieLens100K MovieLens1M MyketDataset NELL NeuroGraphDataset OGB_MAG OMDB OPFDataset
    OSE_GVCS PCPNetDataset PCQM4Mv2 PPI PascalPF PascalVOCKeypoints Planetoid PolBlogs ProteinMPNNDataset QM7b QM9
    RCDD RandomPartitionGraphDataset Reddit Reddit2 RelLinkPredDataset S3DIS SHREC2016 SNAPDataset ShapeNet
    StochasticBlockModelDataset SuiteSparseMatrixCollection TAGDataset TOSCA TUDataset Taobao Teeth3DS Twitch UPFD
    WILLOWObjectClass WebKB WebQSPDataset WikiCS Wikidata5M WikipediaNetwork WordNet18 WordNet18RR Yelp ZINC
    """.split()
)


def misspelt(name: str) -> str:
    """Return why ``name`` is no dataset, in words, or '' if it is one or may be one of a newer torch_geometric."""
    known, word = (*OWN, *OGB, *TORCH_GEOMETRIC), name.partition(":")[0]
    if word in known:
        return ""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower()[:100], by_lower, 1, 0.75)
    if near:
        variant = name[len(word) :][:100]
        return f"there is no dataset `{name[:100]}`; did you mean `{by_lower[near[0]]}{variant}`?"
    if "/" in word or "." in word:
        return (
            f"there is no dataset `{name[:100]}`; a graph of your own is `dataset: file` with its path in `source`, "
            "and --dataset takes a path that exists"
        )
    if word[:1].isupper():  # as all classes of torch_geometric
        return ""
    return (
        f"there is no dataset `{name[:100]}`; there are {', '.join(OWN)}, {', '.join(OGB)}, and those of "
        "torch_geometric, such as Planetoid:Cora"
    )
